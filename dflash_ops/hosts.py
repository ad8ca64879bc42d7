"""hosts.yaml -> validated targets (`settings.Target`); what is wrong is refused with file, line and fix.

Two passes. The first walks the YAML nodes, which know their lines: duplicate keys, values that could become an
option or break a line, numbers that YAML would silently reinterpret (0200 is 128). The second is pydantic: keys,
types, ranges. Nothing is connected to or executed before both have passed.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import yaml

import dflash_ops
from dflash_ops.errors import HostsFileError, UsageError
from dflash_ops.named_file import require_regular
from dflash_ops.settings import DEFAULT_ROOT, Gpus, HostsFile, Idle, Roles, Ssh, Target

HOSTS_FILE_VARIABLE = "DFLASH_HOSTS_FILE"
PLAIN_INTEGER = re.compile(r"(0|[1-9][0-9]{0,8})\Z")
RAW_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?"
    r"(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9A-Fa-f:.]+\])"
    r"(?::(?P<port>[0-9]{1,5}))?\Z"
)

Path_ = tuple[str | int, ...]


def checkout() -> Path:
    """The directory that holds dflash_ops/, trainer/ and hosts.yaml."""
    return Path(dflash_ops.__file__).parent.parent


def hosts_path() -> Path:
    """The file in use: $DFLASH_HOSTS_FILE, else hosts.yaml of this checkout."""
    given = os.environ.get(HOSTS_FILE_VARIABLE)
    return Path(given).expanduser() if given else checkout() / "hosts.yaml"


def load(path: Path | None = None) -> HostsFile:
    """Read and validate; raises HostsFileError naming file, line and fix."""
    path = path or hosts_path()
    try:
        text = require_regular(path, HostsFileError).read_bytes().decode("utf-8")
    except OSError as error:
        raise HostsFileError(
            f"{path}: cannot be read", why=error.strerror or str(error), hint=f"write it, or set {HOSTS_FILE_VARIABLE}"
        ) from None
    except UnicodeDecodeError as error:
        raise HostsFileError(f"{path}: not UTF-8", why=str(error)) from None
    return parse(text, str(path))


def parse(text: str, source: str) -> HostsFile:
    """Validate the text of a hosts.yaml; `source` is what errors call it."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            raise HostsFileError(f"{source}:1: expected `default:` and `targets:`")
        lines = dict(_walk(node, (), source))
        body = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        raise HostsFileError(
            f"{where}: not valid YAML", why=" ".join(str(getattr(error, "problem", "") or error).split())
        ) from None
    except RecursionError:
        raise HostsFileError(f"{source}: nested too deeply, or an alias that holds itself") from None
    except ValueError as error:  # a date such as 2026-99-99
        raise HostsFileError(f"{source}: a value that YAML cannot read", why=str(error)) from None
    targets = body.get("targets")
    if isinstance(targets, dict):
        body["targets"] = {key: _prepared(key, value) for key, value in targets.items()}
    try:
        hosts = HostsFile.model_validate(body)
    except pydantic.ValidationError as error:
        raise _explained(error, lines, source) from None
    if hosts.default not in hosts.targets:
        raise HostsFileError(
            f"{source}:{lines.get(('default',), 1)}: default: {hosts.default!r} is not among targets",
            why=f"targets: {', '.join(sorted(hosts.targets))}",
        )
    return hosts


def select(hosts: HostsFile, names: list[str]) -> list[Target]:
    """The targets called for by -H, in order; raw `user@host:port` strings become plain SSH targets."""
    if not names:
        return [hosts.targets[hosts.default]]
    chosen: list[Target] = []
    for name in names:
        target = hosts.targets.get(name) or _raw(name, sorted(hosts.targets))
        if target.name not in [known.name for known in chosen]:
            chosen.append(target)
    return chosen


def _raw(name: str, known: list[str]) -> Target:
    match = RAW_HOST.match(name)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if match is None or (near and not set(name) & set("@:.")):
        raise UsageError(
            f"no target {name!r} in hosts.yaml",
            why=f"targets: {', '.join(known)}",
            hint=f"did you mean {near[0]!r}?" if near else "name a target, or give user@host:port",
        )
    ssh: dict[str, Any] = {"host": match["host"].strip("[]"), **({"port": int(match["port"])} if match["port"] else {})}
    if match["user"]:
        ssh["user"] = match["user"]
    try:
        return Target.model_validate(
            _prepared(re.sub(r"[^A-Za-z0-9_.-]", "-", name).lstrip("-._"), {"via": "ssh", "ssh": ssh})
        )
    except pydantic.ValidationError as error:
        raise UsageError(f"-H {name!r} is no usable address", why=_sentence(error.errors()[0])) from None


def _prepared(key: Any, value: Any) -> Any:
    """A target's mapping with its name, and with what `via: local` and the root imply."""
    if not isinstance(value, dict):
        return value
    values = dict(value)
    values["name"] = key
    if values.get("via") == "local":
        values.setdefault("python", sys.executable)
        for path in ("root", "workspace", "python"):
            text = values.get(path, DEFAULT_ROOT if path == "root" else None)
            if isinstance(text, str) and text.startswith("~/"):
                values[path] = str(Path(text).expanduser())
    values.setdefault("workspace", values.get("root", DEFAULT_ROOT))
    env = values.get("env")
    if isinstance(env, dict):
        plain = {k: str(v) if type(v) is int or type(v) is float else v for k, v in env.items()}
        values["env"] = plain
    return values


def _walk(node: yaml.Node, path: Path_, source: str) -> Iterator[tuple[Path_, int]]:
    """(path, line) of every node; raises on what must not reach the second pass."""
    line = node.start_mark.line + 1
    yield path, line
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node, path, f"{source}:{line}")
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _walk(item, (*path, index), source)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            key_line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise HostsFileError(f"{source}:{key_line}: a key must be a word")
            _check_scalar(key, (*path, "key"), f"{source}:{key_line}")
            if key.value in seen:
                raise HostsFileError(f"{source}:{key_line}: {key.value!r} is given twice", hint="remove one of the two")
            seen.add(key.value)
            yield from _walk(value, (*path, key.value), source)
            yield (*path, key.value), key_line


def _check_scalar(node: yaml.ScalarNode, path: Path_, where: str) -> None:
    name = ".".join(map(str, path))
    text = node.value
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise HostsFileError(f"{where}: {name} holds a newline, NUL or another control character", hint="remove it")
    if text.startswith("-"):
        raise HostsFileError(
            f"{where}: {name}: {text!r} begins with a dash",
            why="a program on the way could take it for an option",
            hint="write the value without the leading dash",
        )
    if node.tag == "tag:yaml.org,2002:int" and not PLAIN_INTEGER.match(text):
        raise HostsFileError(
            f"{where}: {name}: {text!r} is not a plain decimal number",
            why="YAML would read it as something else",
            hint="write digits only, without leading zero; quote it if it is meant as text",
        )


def _explained(error: pydantic.ValidationError, lines: dict[Path_, int], source: str) -> HostsFileError:
    """The first complaint, at its line, in an operator's words."""
    first = error.errors()[0]
    path = tuple(part for part in first["loc"] if not (isinstance(part, str) and part.startswith("[")))
    known = path
    while known and known not in lines:
        known = known[:-1]
    line = lines.get(known, 1)
    name = ".".join(map(str, path)) or "the file"
    if first["type"] == "extra_forbidden":
        fields = _fields_at(path)
        near = difflib.get_close_matches(str(path[-1]), fields, n=1, cutoff=0.5)
        return HostsFileError(
            f"{source}:{line}: unknown key {name!r}",
            why=f"known here: {', '.join(fields)}",
            hint=f"did you mean {near[0]!r}?" if near else "",
        )
    return HostsFileError(f"{source}:{line}: {name}: {_sentence(first)}")


def _sentence(complaint: Any) -> str:
    given = complaint.get("input")
    match complaint["type"]:
        case "missing":
            return "is missing"
        case "int_type" | "int_parsing":
            return f"must be a whole number, got {given!r}"
        case "string_type":
            return f"must be text, got {given!r}; put it in quotes if it is meant as text"
        case "value_error":
            return str(complaint["ctx"]["error"])
        case "dict_type" | "model_type" | "model_attributes_type":
            return f"must be a group of `key: value` lines, got {given!r}"
    return f"{complaint['msg'][0].lower()}{complaint['msg'][1:]}, got {given!r}"


GROUPS: dict[str, type[pydantic.BaseModel]] = {"ssh": Ssh, "gpus": Gpus, "roles": Roles, "idle": Idle}


def _fields_at(path: Path_) -> list[str]:
    model: type[pydantic.BaseModel] = HostsFile
    if len(path) > 2 and path[0] == "targets":
        model = Target
        for part in path[2:-1]:
            model = GROUPS.get(str(part), model)
    return sorted(name for name in model.model_fields if name != "name")
