"""What the laptop and the agent say to each other where no module of the agent owns it: requests and answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dflash_ops.agent.lock import Holder
from dflash_ops.agent.manifest import Manifest
from dflash_ops.agent.releases import ReleaseInfo
from dflash_ops.agent.runs import RunStatus


@dataclass(frozen=True, slots=True)
class Nothing:
    """A request without fields."""


@dataclass(frozen=True, slots=True)
class SelectRequest:
    """Make this release current if it is there. `rollback`: empty means the previous one."""

    release_id: str
    who: str


@dataclass(frozen=True, slots=True)
class InstallRequest:
    manifest: Manifest
    who: str


@dataclass(frozen=True, slots=True)
class Current:
    """The release in use, with what it consists of; empty where nothing is deployed."""

    release_id: str | None
    manifest: Manifest | None


@dataclass(frozen=True, slots=True)
class Releases:
    releases: tuple[ReleaseInfo, ...]


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Which run: by id, by the launch's nonce, or the newest."""

    run_id: str = ""
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class Overview:
    """What `fab status` shows."""

    run: RunStatus | None
    release: str | None
    holder: Holder | None
    """Who holds the launch lock right now; None where it is free."""


@dataclass(frozen=True, slots=True)
class RunsRequest:
    limit: int = 20


@dataclass(frozen=True, slots=True)
class Runs:
    runs: tuple[RunStatus, ...]


@dataclass(frozen=True, slots=True)
class GpuReport:
    """What `fab gpus` shows."""

    status: str
    lines: tuple[str, ...]
    notes: tuple[str, ...]
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """What to look at on the machine below a container. The verdict is made in the container, by its gate."""

    samples: int = 3


@dataclass(frozen=True, slots=True)
class Probed:
    """`GpuFacts` as JSON."""

    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ClearRequest:
    who: str
    legacy_caches: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cleared:
    lines: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class AttachRequest:
    run_id: str = ""


@dataclass(frozen=True, slots=True)
class AttachAnswer:
    """The command that shows the run on a terminal, and the environment it needs there."""

    run_id: str
    argv: tuple[str, ...]
