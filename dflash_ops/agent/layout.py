"""Where things lie under a target's root and workspace. The only module that knows these names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.errors import EnvironmentUnfit

RELEASE_ID = re.compile(r"[0-9a-f]{16}\Z")
RUN_ID = re.compile(r"[0-9]{8}T[0-9]{6}Z-[a-z0-9_]{1,40}-[0-9a-f]{4}\Z")


@dataclass(frozen=True, slots=True)
class Layout:
    """Absolute paths on the target."""

    root: Path
    workspace: Path

    @property
    def releases(self) -> Path:
        return self.root / "releases"

    @property
    def current(self) -> Path:
        """A link to the release that the next launch takes."""
        return self.root / "current"

    @property
    def previous(self) -> Path:
        """A link to the release that `rollback` goes back to."""
        return self.root / "previous"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def pycache(self) -> Path:
        """The trainer's bytecode, one directory for each release."""
        return self.root / "pycache"

    @property
    def lock(self) -> Path:
        """Held by flock from the gate to the end of the trainer."""
        return self.root / "lock"

    @property
    def holder(self) -> Path:
        """Who holds the lock: for people; the lock itself is the flock."""
        return self.root / "lock.json"

    @property
    def deploy_lock(self) -> Path:
        return self.root / "deploy.lock"

    @property
    def audit(self) -> Path:
        return self.root / "audit.jsonl"

    @property
    def tmux_socket(self) -> Path:
        """Not under /tmp, where a cleaner would cut every client off."""
        return self.root / "tmux.sock"

    @property
    def runs(self) -> Path:
        return self.workspace / "runs"

    def run(self, run_id: str) -> Path:
        return self.runs / run_id

    def release(self, release_id: str) -> Path:
        return self.releases / release_id

    def newest_log(self, variant: str) -> Path:
        return self.workspace / f"train_{variant}.log"

    def create(self) -> None:
        """Make the directories; EnvironmentUnfit where the disk refuses."""
        try:
            for path in (self.releases, self.cache, self.runs):
                path.mkdir(parents=True, exist_ok=True, mode=0o755)
        except OSError as error:
            raise EnvironmentUnfit(
                "the target's directories cannot be made",
                why=str(error),
                hint="check `root:` and `workspace:` in hosts.yaml, and free space there",
            ) from None


def linked_release(link: Path) -> str | None:
    """The release id that `current` or `previous` points at; None where the link is missing or foreign."""
    try:
        name = link.readlink().name
    except OSError:
        return None
    return name if RELEASE_ID.match(name) else None
