"""A target inside an LXC container of a Proxmox host: plain SSH, composed with one hop.

The hop is `pct exec VMID -- env -i ... argv`. It adds no quoting: pct hands argv on to execvp untouched, so the one
`render` of the SSH side is still the only place where shell text is made. Without `--` pct would take the command's
own options for its own, so it is always there.

`pct exec` passes the host root's whole environment into the container (secrets included) and a PATH without
/usr/local; `--keep-env 0` stops that where pct knows it (pve-container 5.0.9), `env -i` inside does so everywhere.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from dflash_ops.errors import (
    AgentFailed,
    ContainerMissing,
    ContainerStopped,
    OpsError,
)
from dflash_ops.transport.base import Completed, Transport
from dflash_ops.transport.ssh import SshStream, SshTransport, limited

STATUS_LIMIT_S = 15.0
ENVIRONMENT = {
    "HOME": "/root",
    "USER": "root",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "TERM": "xterm-256color",
}


class PctTransport:
    """Runs argv in container `vmid` of the host that `ssh` reaches.

    `environment` adds to, or replaces parts of, the clean environment; `pct` is the tool's absolute path there.
    """

    def __init__(
        self, ssh: SshTransport, vmid: int, *, pct: str = "/usr/sbin/pct", environment: Mapping[str, str] | None = None
    ) -> None:
        self._ssh = ssh
        self._vmid = str(vmid)
        self._pct = pct
        self._environment = {**ENVIRONMENT, **(environment or {})}
        self._clears: bool | None = None  # whether this pct knows --keep-env; learnt from its first answer

    def call(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        deadline: float,
        silence: float | None = None,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Completed:
        """See `Transport.call`."""
        ends_at = time.monotonic() + deadline
        if self._clears is None and isinstance(stdin, Iterator):  # it could not be sent a second time
            self._learn()
        completed = self._ssh.execute(
            self._hop(argv, deadline), stdin=stdin, deadline=deadline, silence=silence, on_stdout=on_stdout
        )
        if self._clears is None:
            self._clears = not _refuses_keep_env(completed)
            if not self._clears:  # nothing has run yet: pct refused its own arguments
                left = ends_at - time.monotonic()
                return self._ssh.execute(
                    self._hop(argv, left), stdin=stdin, deadline=left, silence=silence, on_stdout=on_stdout
                )
        return completed

    @contextmanager
    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[SshStream]:
        """See `Transport.stream`."""
        if self._clears is None:
            self._learn()
        with self._ssh.stream(self._hop(argv), stdin=stdin) as stream:
            yield stream

    def shell(self, argv: Sequence[str]) -> int:
        """See `Transport.shell`."""
        if self._clears is None:
            self._learn()
        return self._ssh.shell(self._hop(argv))

    def explain(self, completed: Completed) -> OpsError:
        """See `Transport.explain`: by pct's words first, then by asking pct for the container's state."""
        if completed.returncode is None and not self._ssh.link.alive:
            return self._ssh.explain(completed)
        named = self._named(completed.stderr)
        if named is not None:
            return named
        # Codes alone never name the layer: pct, lxc-attach and the command share 1, 127 and 255.
        try:
            status = self._ssh.execute(
                limited((self._pct, "status", self._vmid), STATUS_LIMIT_S),
                stdin=b"",
                deadline=STATUS_LIMIT_S,
                on_stdout=None,
            )
        except OpsError as error:
            return error
        if status.returncode is None:
            return self._ssh.explain(status)
        named = self._named(status.stderr)
        if named is not None:
            return named
        state = status.stdout.decode("utf-8", "replace").strip()
        if status.returncode in (126, 127):
            return self._no_pct(f"exit code {status.returncode}")
        if state == "status: stopped":
            return self._stopped("it stopped while the command ran" if completed.returncode is None else "")
        if state != "status: running":
            return ContainerMissing(f"container {self._vmid}: pct does not know its state", why=state or _last(status))
        return self._ssh.explain(completed)

    def host(self) -> Transport | None:
        """See `Transport.host`: the Proxmox host, where every guest's processes can be seen."""
        return self._ssh

    def close(self) -> None:
        """See `Transport.close`."""
        self._ssh.close()

    def route_argv(self, argv: Sequence[str], deadline: float) -> tuple[str, ...]:
        """See `Transport.route_argv`: pct's hop into the container."""
        return self._hop(argv, deadline)

    def _hop(self, argv: Sequence[str], seconds: float | None = None) -> tuple[str, ...]:
        keep_env = () if self._clears is False else ("--keep-env", "0")
        variables = [f"{name}={value}" for name, value in self._environment.items()]
        inside = ("/usr/bin/env", "-i", *variables, *argv)
        # The limit sits inside the container: ending pct on the host would leave the command running there.
        return (self._pct, "exec", self._vmid, *keep_env, "--", *(limited(inside, seconds) if seconds else inside))

    def _learn(self) -> None:
        """Ask pct once whether it knows --keep-env; an error here is the first sign of a broken route."""
        completed = self._ssh.execute(
            self._hop(("/bin/true",), STATUS_LIMIT_S), stdin=b"", deadline=STATUS_LIMIT_S, on_stdout=None
        )
        if _refuses_keep_env(completed):
            self._clears = False
        elif completed.returncode == 0:
            self._clears = True
        else:
            raise self.explain(completed)

    def _named(self, stderr: bytes) -> OpsError | None:
        """The failure that pct's or the shell's own words name, if they do."""
        text = stderr.decode("utf-8", "replace")
        if re.search(r"Configuration file '[^']*' does not exist", text):
            return ContainerMissing(f"container {self._vmid} does not exist on {self._ssh.link.label}", why=_tail(text))
        if re.search(r"container '\d+' not running!", text):
            return self._stopped("")
        if re.search(rf"{re.escape(self._pct)}: (?:No such file|not found|Permission denied|cannot execute)", text):
            return self._no_pct(_tail(text))
        if "please run as root" in text:
            return ContainerMissing(
                f"{self._pct} refuses to run",
                why="it must run as root",
                hint="log in as root, or let `pct:` in hosts.yaml name a wrapper that may use sudo",
            )
        if "unable to parse option" in text or "Parameter verification failed" in text:
            return AgentFailed(f"{self._pct} does not understand the call", why=_tail(text))
        return None

    def _stopped(self, why: str) -> OpsError:
        hint = f"start it on {self._ssh.link.label}: pct start {self._vmid}"
        return ContainerStopped(f"container {self._vmid} is not running", why=why, hint=hint)

    def _no_pct(self, why: str) -> OpsError:
        return ContainerMissing(
            f"{self._ssh.link.label} has no {self._pct}",
            why=why,
            hint="is it a Proxmox host? `pct:` in hosts.yaml names the tool's path",
        )


def _refuses_keep_env(completed: Completed) -> bool:
    return completed.returncode not in (0, None) and b"Unknown option: keep-env" in completed.stderr


def _tail(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else ""


def _last(completed: Completed) -> str:
    return _tail(completed.stderr.decode("utf-8", "replace"))
