"""From a target in hosts.yaml to its agent: the one place where `via:` is looked at."""

from __future__ import annotations

import contextlib

from dflash_ops.remote import Place, Remote
from dflash_ops.settings import DEFAULT_ROOT, Target
from dflash_ops.transport.base import Transport
from dflash_ops.transport.local import LocalTransport

ROUTE_VARIABLES = ("HOME", "USER", "LANG", "PATH", "TERM")
HOST_PLACE = Place(python="/usr/bin/python3", root=DEFAULT_ROOT, workspace=DEFAULT_ROOT)
"""Where the agent lives on a Proxmox host: its own Python, and root's data directory."""

_open: dict[str, Remote] = {}


def connect(target: Target) -> Remote:
    """The target's agent; chained verbs share one connection."""
    if target.name not in _open:
        place = Place(python=target.python, root=target.root, workspace=target.workspace)
        _open[target.name] = Remote(open_transport(target), place)
    return _open[target.name]


def open_transport(target: Target) -> Transport:
    """The way to a target. Nothing is connected yet."""
    if target.via == "local":
        return LocalTransport()
    # Imported here: Paramiko and its ciphers take longer to load than a local verb takes to run.
    from dflash_ops.transport.pct import PctTransport
    from dflash_ops.transport.ssh import SshTransport

    assert target.ssh is not None  # validated with the file
    ssh = SshTransport(target.ssh)
    if target.via == "ssh":
        return ssh
    assert target.vmid is not None  # validated with the file
    # The trainer's other variables travel in the agent's request: argv can be seen by every process on both machines.
    environment = {name: value for name, value in target.env.items() if name in ROUTE_VARIABLES}
    return PctTransport(ssh, target.vmid, pct=target.pct, environment=environment)


def connect_host(remote: Remote) -> Remote | None:
    """The agent on the machine below the target (the Proxmox host), over the same connection; None where none is."""
    transport = remote.transport.host()
    return Remote(transport, HOST_PLACE) if transport is not None else None


def close_all() -> None:
    """Let go of every connection; called once, at the end of the program."""
    while _open:
        _, remote = _open.popitem()
        with contextlib.suppress(Exception):  # the program is over: nothing is left to tell
            remote.transport.close()
