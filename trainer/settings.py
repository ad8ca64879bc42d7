"""Settings between their forms: nested frozen dataclasses, JSON, and the command line's dotted `key=value`.

Knows no setting by name; `trainer.config` declares them. Every refusal names the key, and where it is unknown the
nearest one that is not.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from typing import Any, Literal, TypeVar


class ConfigError(ValueError):
    """A configuration that cannot be run; the message says what, why and what to do."""


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with the sentence that a user needs."""
    if not condition:
        raise ConfigError(message)


ConfigT = TypeVar("ConfigT")


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration as plain JSON types."""
    loaded: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return loaded


def from_dict(cls: type[ConfigT], values: dict[str, Any], prefix: str = "") -> ConfigT:
    """The inverse of `to_dict`; raises ConfigError on an unknown key or a wrong type.

    `prefix` is the dotted path of this group, for the messages.
    """
    hints = typing.get_type_hints(cls)
    known = {f"{prefix}{f.name}" for f in dataclasses.fields(cls)}  # type: ignore[arg-type]  # cls is a dataclass
    for key in values:
        if f"{prefix}{key}" not in known:
            raise ConfigError(_unknown(f"{prefix}{key}", known))
    return cls(**{key: _coerce(f"{prefix}{key}", value, hints[key]) for key, value in values.items()})


def override(config: ConfigT, assignments: dict[str, str]) -> ConfigT:
    """Apply dotted `key=value` overrides given as text; a wrong key names the nearest right one."""
    values = to_dict(config)
    keys = set(flatten(values))
    for dotted, text in assignments.items():
        if dotted not in keys:
            raise ConfigError(_unknown(dotted, keys))
        *parents, leaf = dotted.split(".")
        node = values
        for parent in parents:
            node = node[parent]
        node[leaf] = _parse(text, _hint(type(config), dotted))
    return from_dict(type(config), values)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as {dotted key: value}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _hint(cls: type[Any], dotted: str) -> Any:
    """The type of a setting given by its dotted key."""
    for part in dotted.split("."):
        cls = typing.get_type_hints(cls)[part]
    return cls


def _parse(text: str, hint: Any = None) -> Any:
    if hint is str:
        return text  # a path may look like a number or hold a comma
    if hint == str | None:
        return None if text in ("none", "None", "null") else text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or a number or nesting beyond what Python reads
        if "," in text:
            return [_parse(part.strip()) for part in text.split(",") if part.strip()]
        return {"none": None, "None": None, "True": True, "False": False}.get(text, text)


def _coerce(key: str, value: Any, hint: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        require(isinstance(value, dict), f"{key} must be a group of settings")
        return from_dict(hint, value, f"{key}.")  # type: ignore[arg-type]  # is_dataclass narrows to instance or type
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        rest = [a for a in args if a is not type(None)]
        return _coerce(key, value, rest[0])
    if origin is Literal:
        if value is None and "none" in args:
            value = "none"  # on the command line the word stands for both
        require(value in args, f"{key} must be one of {', '.join(map(str, args))}; got {value!r}")
        return value
    if origin is tuple:
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_coerce(key, item, args[0]) for item in items)
        require(len(items) == len(args), f"{key} needs {len(args)} values, got {len(items)}")
        return tuple(_coerce(key, item, arg) for item, arg in zip(items, args, strict=True))
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # a whole number may be longer than any float
            number = math.inf
        require(math.isfinite(number), f"{key} must be a finite number, got {str(value)[:40]}")
        return number
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    require(
        isinstance(value, hint) and (hint is bool or not isinstance(value, bool)),
        f"{key} must be {words.get(hint, hint.__name__)}, got {str(value)[:40]!r}",
    )
    require(hint is not int or abs(value) < 2**63, f"{key} must lie within 64 bits")
    return value


def _unknown(key: str, known: set[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown setting {key!r}{hint}"
