"""From a target's settings to the transport that reaches it."""

from __future__ import annotations

from dflash_ops.settings import Target
from dflash_ops.transport.base import Transport
from dflash_ops.transport.local import LocalTransport
from dflash_ops.transport.pct import PctTransport
from dflash_ops.transport.ssh import SshTransport

ROUTE_VARIABLES = ("HOME", "USER", "LANG", "PATH", "TERM")


def route(target: Target) -> Transport:
    """The way to a target. Nothing is connected yet, and no error of the network can come from here."""
    if target.via == "local":
        return LocalTransport()
    assert target.ssh is not None  # validated with the file
    ssh = SshTransport(target.ssh)
    if target.via == "ssh":
        return ssh
    assert target.vmid is not None
    # The trainer's other variables travel in the agent's request: argv can be seen by every process on both machines.
    environment = {name: value for name, value in target.env.items() if name in ROUTE_VARIABLES}
    return PctTransport(ssh, target.vmid, pct=target.pct, environment=environment)
