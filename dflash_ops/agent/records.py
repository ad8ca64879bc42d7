"""Frozen dataclasses to JSON and back, for everything that crosses between laptop, agent and disk.

Unknown keys are ignored and missing ones take their defaults, so that a newer agent's record can be read by an
older client and the other way round. A wrong type raises ValueError naming the field.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

RecordT = TypeVar("RecordT")


def dump(record: Any) -> dict[str, Any]:
    """The record as plain JSON types."""
    return {field.name: _plain(getattr(record, field.name)) for field in dataclasses.fields(record)}


def load(cls: type[RecordT], body: Any) -> RecordT:
    """The inverse of `dump`; ValueError names the field that is missing or wrong."""
    if not isinstance(body, dict):
        raise ValueError(f"{cls.__name__}: expected an object, got {type(body).__name__}")
    hints = typing.get_type_hints(cls)
    values = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # cls is a dataclass by contract
        if field.name in body:
            values[field.name] = _typed(f"{cls.__name__}.{field.name}", body[field.name], hints[field.name])
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{cls.__name__}.{field.name} is missing")
    return cls(**values)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dump(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _typed(where: str, value: Any, hint: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        return _typed(where, value, next(a for a in args if a is not type(None)))
    if dataclasses.is_dataclass(hint):
        return load(typing.cast(type[Any], hint), value)
    if origin in (tuple, list):
        if not isinstance(value, list):
            raise ValueError(f"{where}: expected a list")
        items = [_typed(where, item, args[0]) for item in value]
        return tuple(items) if origin is tuple else items
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected an object")
        return {str(key): _typed(where, item, args[1]) for key, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ValueError(f"{where}: expected {hint.__name__}, got {type(value).__name__}")
    return value
