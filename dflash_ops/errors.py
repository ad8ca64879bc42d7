"""Everything that can go wrong, as one tree. Each error knows its exit code, its hint and its runbook.

    OpsError
    ├── UsageError               2    a wrong argument on the command line
    │   └── HostsFileError       2    hosts.yaml is missing, malformed or unsafe
    ├── HostUnreachable          10   no TCP or SSH connection to the host in time
    │   └── AuthenticationFailed 10   the host answered and refused our keys
    ├── HostKeyRefused           11   the host's key is unknown
    │   └── HostKeyChanged       11   the host's key is not the one we know
    ├── ContainerMissing         12   the Proxmox host has no such container (or no pct)
    ├── ContainerStopped         13   the container exists and does not run
    ├── AgentFailed              14   Python or the agent could not run on the target
    ├── GateRefused              20   GPUs busy or unknown, or a trainer already runs
    ├── LockHeld                 21   another launch or a live trainer holds the lock
    ├── SyntaxCheckFailed        22   a trainer file does not compile with the target's Python
    ├── UploadCorrupt            23   the upload was cut or altered
    ├── EnvironmentUnfit         24   Python, torch, CUDA, kernels, disk: not fit to train
    ├── RunFailed                30   the trainer ended with an error
    ├── RunLost                  31   the run vanished: killed, or its container restarted
    └── DeadlineExceeded         124  no answer in time

Every error prints one line of what, one of why, one of what to do next, and the runbook where there is one.
"""

from __future__ import annotations

from typing import ClassVar

INTERRUPTED = 130


class OpsError(Exception):
    """Base class. `what` names the failure, `why` gives its cause, `hint` the next step."""

    exit_code: ClassVar[int] = 1
    default_hint: ClassVar[str] = ""
    runbook: ClassVar[str | None] = None
    reported = False
    """True where the agent itself reported it: the route worked, and asking again changes nothing."""

    def __init__(self, what: str, *, why: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.hint = hint or self.default_hint

    def lines(self) -> list[str]:
        """The message as an operator sees it, one fact a line."""
        parts = [f"error: {self.what}"]
        if self.why:
            parts.append(f"  why: {self.why}")
        if self.hint:
            parts.append(f"  next: {self.hint}")
        if self.runbook:
            parts.append(f"  runbook: runbooks/{self.runbook}.md")
        return parts


class UsageError(OpsError):
    """A wrong argument on the command line."""

    exit_code = 2


class HostsFileError(UsageError):
    """hosts.yaml is missing, malformed or holds a value that is refused."""

    default_hint = "fix the line named above; docs/hosts.md lists every key"


class HostUnreachable(OpsError):
    """No TCP or SSH connection to the host in time."""

    exit_code = 10
    default_hint = "check the address, the network and that sshd runs there"
    runbook = "host-unreachable"


class AuthenticationFailed(HostUnreachable):
    """The host answered and refused our keys."""

    default_hint = "load the right key into ssh-agent, or set ssh.identity in hosts.yaml"


class HostKeyRefused(OpsError):
    """The host's key is not in known_hosts."""

    exit_code = 11
    default_hint = "compare the fingerprint on the host's console, then `fab -H NAME trust`"
    runbook = "host-key"


class HostKeyChanged(HostKeyRefused):
    """The host's key differs from the one in known_hosts."""

    default_hint = "do not go on before you know why the key changed; then `fab -H NAME trust --replace`"


class ContainerMissing(OpsError):
    """The Proxmox host has no such container, or is no Proxmox host."""

    exit_code = 12
    default_hint = "check vmid in hosts.yaml against `pct list` on the host"
    runbook = "container-stopped"


class ContainerStopped(OpsError):
    """The container exists and does not run."""

    exit_code = 13
    default_hint = "start it on the host: pct start VMID"
    runbook = "container-stopped"


class AgentFailed(OpsError):
    """Python is missing on the target, or the agent could not run or answer."""

    exit_code = 14
    default_hint = "check `python:` in hosts.yaml; it must be an absolute path that exists on the target"
    runbook = "agent-failed"


class GateRefused(OpsError):
    """Starting now is not known to be safe."""

    exit_code = 20
    runbook = "gpu-busy"


class LockHeld(OpsError):
    """Another launch or a live trainer holds the lock."""

    exit_code = 21
    default_hint = "wait for it, or `fab stop`; `fab status` shows the holder"
    runbook = "lock-held"


class SyntaxCheckFailed(OpsError):
    """A trainer file does not compile with the target's Python."""

    exit_code = 22
    default_hint = "fix the file and deploy again; the release in use was not touched"


class UploadCorrupt(OpsError):
    """What arrived is not what was sent."""

    exit_code = 23
    default_hint = "deploy again; the release in use was not touched"
    runbook = "stale-partial-release"


class EnvironmentUnfit(OpsError):
    """The target cannot train: Python, torch, kernels, disk."""

    exit_code = 24
    default_hint = "`fab doctor` lists what is missing"
    runbook = "environment-unfit"


class RunFailed(OpsError):
    """The trainer ended with an error."""

    exit_code = 30
    default_hint = "`fab diagnose`, then `fab tail-log --no-follow`"


class RunLost(OpsError):
    """The run vanished: killed, or its container or host restarted."""

    exit_code = 31
    default_hint = "`fab diagnose`; `fab launch --resume RUN` goes on from its last checkpoint"
    runbook = "run-lost"


class DeadlineExceeded(OpsError):
    """No answer in time."""

    exit_code = 124
    default_hint = "try again; if it repeats, look at the host itself"
    runbook = "host-unreachable"
