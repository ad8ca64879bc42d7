"""Nested dicts and lists of tensors and JSON values, taken apart for storage and put together again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """An independent contiguous copy on the CPU."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor of the structure."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from tensors_of(item)


def split(value: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Nested state -> the same with tensors replaced by {"tensor": key}, and the tensors by key."""
    tensors: dict[str, torch.Tensor] = {}

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, torch.Tensor):
            while path in tensors:  # {"a.b": x, "a": {"b": y}} gives the same path twice
                path += "'"
            tensors[path] = node
            return {"tensor": path}
        if isinstance(node, dict):
            return {"dict": [[key, walk(item, f"{path}.{key}" if path else str(key))] for key, item in node.items()]}
        if isinstance(node, list):
            return {"list": [walk(item, f"{path}.{i}") for i, item in enumerate(node)]}
        return {"value": node}

    return walk(value, ""), tensors


def join(node: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """The inverse of `split`."""
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: join(item, tensors) for key, item in content}
    if kind == "list":
        return [join(item, tensors) for item in content]
    return content
