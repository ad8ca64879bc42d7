"""From a target in hosts.yaml to its agent: the one place where `via:` is looked at."""

from __future__ import annotations

import contextlib

from dflash_ops.errors import UsageError
from dflash_ops.remote import Place, Remote
from dflash_ops.settings import Target
from dflash_ops.transport.base import Transport
from dflash_ops.transport.local import LocalTransport

_open: dict[str, Remote] = {}


def connect(target: Target) -> Remote:
    """The target's agent; chained verbs share one connection."""
    if target.name not in _open:
        place = Place(python=target.python, root=target.root, workspace=target.workspace)
        _open[target.name] = Remote(open_transport(target), place)
    return _open[target.name]


def open_transport(target: Target) -> Transport:
    if target.via == "local":
        return LocalTransport()
    raise UsageError(f"target {target.name!r}: via: {target.via} is not available in this version")


def close_all() -> None:
    """Let go of every connection; called once, at the end of the program."""
    while _open:
        _, remote = _open.popitem()
        with contextlib.suppress(Exception):  # the program is over: nothing is left to tell
            remote.transport.close()
