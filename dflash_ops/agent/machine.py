"""What this machine says about memory, disks and the kernel: small readings, each None or empty where it is unknown."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60
"""cgroup v1 writes a number of this size where there is no limit."""


@dataclass(frozen=True, slots=True)
class Memory:
    """This cgroup's memory in bytes, and how often the kernel stepped in."""

    used: int | None = None
    limit: int | None = None
    """None: no limit but the machine's."""
    high_events: int | None = None
    """How often allocations were throttled at memory.high."""
    oom_kills: int | None = None


@dataclass(frozen=True, slots=True)
class Disk:
    """Free space and inodes of the file system that holds `path`."""

    path: str
    free_bytes: int
    total_bytes: int
    free_inodes: int
    total_inodes: int
    """0: the file system has no fixed inode table."""

    @property
    def full(self) -> bool:
        """Too little left to write a log line with certainty."""
        return self.free_bytes < 4 << 20 or (self.total_inodes > 0 and self.free_inodes < 16)


def memory(root: Path = CGROUP) -> Memory:
    """From the container's own cgroup: v2, else v1."""
    if (root / "memory.current").exists() or (root / "cgroup.controllers").exists():
        events = _fields(root / "memory.events")
        limit = _number(root / "memory.max")
        return Memory(_number(root / "memory.current"), limit, events.get("high"), events.get("oom_kill"))
    v1 = root / "memory"
    limit = _number(v1 / "memory.limit_in_bytes")
    limit = limit if limit is not None and limit < UNLIMITED else None
    return Memory(
        _number(v1 / "memory.usage_in_bytes"), limit, None, _fields(v1 / "memory.oom_control").get("oom_kill")
    )


def disk(path: Path) -> Disk | None:
    """None where the path does not exist."""
    try:
        space = os.statvfs(path)
    except OSError:
        return None
    return Disk(
        str(path),
        space.f_bavail * space.f_frsize,
        space.f_blocks * space.f_frsize,
        space.f_favail,
        space.f_files,
    )


def uptime_s() -> float | None:
    """Seconds since the kernel started."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return float(Path("/proc/uptime").read_text().split()[0])
    return None


def said_by(argv: list[str], limit_s: float, keep: int = 1 << 16) -> str | None:
    """What a program prints, both streams, at most `keep` bytes of its end; None where it is missing or hangs."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout[-keep:].decode("utf-8", "replace")


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text().strip())
    return None


def _fields(path: Path) -> dict[str, int]:
    found = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if value.strip().isdigit():
                found[name] = int(value)
    return found
