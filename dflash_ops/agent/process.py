"""Processes that cannot be mistaken: a pid counts only with its start time and the boot it belongs to."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Identity:
    """One process for all time: pid, start time in clock ticks (field 22 of /proc/PID/stat), boot."""

    pid: int
    started: int
    boot: str


def boot() -> str:
    """Changes when the machine or the container restarts.

    The kernel's boot id alone would miss a restart of the container, whose kernel is the host's; the start time of
    the container's own pid 1 changes with it.
    """
    kernel = (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{kernel}/{_stat(1)[1]}"


def identify(pid: int) -> Identity | None:
    """The process that has this pid now; None where there is none, or only a zombie."""
    try:
        state, started = _stat(pid)
    except OSError:
        return None
    return None if state in "ZX" else Identity(pid, started, boot())


def alive(identity: Identity | None) -> bool:
    return identity is not None and identify(identity.pid) == identity


def send(identity: Identity, number: signal.Signals) -> bool:
    """Signal exactly this process; False where it is gone. The pidfd closes the gap between check and signal."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    try:
        if not alive(identity):
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def wait_gone(identity: Identity, timeout: float) -> bool:
    """Wait until the process has ended; False where it lives on after `timeout` seconds."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return True
    try:
        if not alive(identity):
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout) * 1000))
    finally:
        os.close(descriptor)


def command_lines() -> dict[int, list[str]]:
    """argv of every process that this one may see."""
    found: dict[int, list[str]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                raw = (entry / "cmdline").read_bytes()
                if raw:
                    found[int(entry.name)] = raw.decode("utf-8", "replace").rstrip("\0").split("\0")
    return found


def cpuset() -> str:
    """The CPUs this process may use, as the kernel writes them: 0-3,8."""
    cpus = sorted(os.sched_getaffinity(0))
    spans: list[list[int]] = []
    for cpu in cpus:
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def oom_kills() -> int | None:
    """How many processes the kernel has killed for memory in this cgroup; None where that cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        for line in (PROC / "self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                candidates = [Path("/sys/fs/cgroup") / path.lstrip("/") / "memory.events"]
            elif "memory" in controllers.split(","):
                candidates = [Path("/sys/fs/cgroup/memory") / path.lstrip("/") / "memory.oom_control"]
                candidates.append(Path("/sys/fs/cgroup/memory/memory.oom_control"))
            else:
                continue
            for file in candidates:
                if file.exists():
                    for field in file.read_text().splitlines():
                        name, _, value = field.partition(" ")
                        if name == "oom_kill":
                            return int(value)
    return None


def _stat(pid: int) -> tuple[str, int]:
    """(state, start time). The command name may hold spaces and parentheses: fields count from the last one."""
    fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
