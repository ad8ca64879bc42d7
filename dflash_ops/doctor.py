"""`fab doctor` from the operator's side: laptop, host, container, and what only shows when they are compared."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from dataclasses import dataclass

from dflash_ops.agent.doctor import DoctorRequest, Examined, Line
from dflash_ops.agent.gate import SLOW_KERNELS_ALLOWED
from dflash_ops.agent.messages import Nothing
from dflash_ops.connect import connect_host
from dflash_ops.errors import AgentFailed, EnvironmentUnfit, OpsError
from dflash_ops.launch import target_overrides
from dflash_ops.remote import Remote
from dflash_ops.settings import Target

DEADLINE_S = 300.0
SKEW_S = 5.0
PINS = {"fabric": "3.2.3", "invoke": "2.2.1"}


@dataclass(frozen=True, slots=True)
class Report:
    """All lines in order; `error` is why the target could not be asked."""

    lines: tuple[Line, ...]
    error: OpsError | None = None

    @property
    def fit(self) -> bool:
        return self.error is None and all(line.verdict != "bad" for line in self.lines)


def examine(target: Target, remote: Remote, *, quick: bool) -> Report:
    """Ask everyone; an unreachable target leaves the laptop's lines."""
    lines = laptop()
    request = DoctorRequest(
        gpu_count=target.gpus.count if target.gpus else None,
        min_free_gib=target.min_free_gib,
        slow_kernels_allowed=target_overrides(target).get(SLOW_KERNELS_ALLOWED) == "true",
        quick=quick,
    )
    try:
        before: Examined | None = None
        host = connect_host(remote)
        if host is not None:
            before, host_lines = _ask_host(host)
            lines += host_lines
        began = time.time()
        inside = remote.call("doctor", request, Examined, deadline=DEADLINE_S)
    except OpsError as error:
        return Report(tuple(lines), error)
    lines += inside.lines
    # The target's clock was read at the end of its work, so the answer's arrival is the moment to compare with.
    lines.append(_clock(inside.time - time.time(), time.time() - began))
    if before is not None and before.driver and inside.driver:
        lines.append(compare_drivers(before.driver, inside.driver))
    return Report(tuple(lines))


def laptop() -> list[Line]:
    """This machine: its Python, and the libraries that must be exactly these."""
    lines = [Line("laptop", "Python", "ok", platform.python_version())]
    for name in ("fabric", "invoke", "paramiko", "libtmux"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            lines.append(Line("laptop", name, "bad", "not installed", "pip install -e ."))
            continue
        right = PINS.get(name, version) == version
        fix = "" if right else f"pip install {name}=={PINS[name]}: other versions break -H"
        lines.append(Line("laptop", name, "ok" if right else "bad", version, fix))
    return lines


def compare_drivers(host: str, container: str) -> Line:
    """The user-space driver must equal the kernel's module exactly."""
    if host == container:
        return Line("both", "driver", "ok", f"{host} on the host and in the container")
    detail = f"{host} on the host, {container} in the container"
    return Line("both", "driver", "bad", detail, "runbooks/driver-mismatch.md")


def _ask_host(host: Remote) -> tuple[Examined | None, list[Line]]:
    try:
        found = host.call("doctor-host", Nothing(), Examined, deadline=DEADLINE_S)
    except (AgentFailed, EnvironmentUnfit) as error:
        return None, [Line("host", "agent", "bad", error.what, error.hint or "runbooks/agent-failed.md")]
    return found, list(found.lines)


def _clock(skew: float, took: float) -> Line:
    if abs(skew) <= SKEW_S:
        return Line("both", "clock", "ok", f"within {SKEW_S:.0f} s of this laptop")
    ahead = "ahead of" if skew > 0 else "behind"
    return Line("both", "clock", "note", f"{abs(skew):.0f} s {ahead} this laptop", "run chrony or ntpd on both")
