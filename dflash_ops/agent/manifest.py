"""What a release consists of; its id is the hash of that."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dflash_ops.agent import files, records
from dflash_ops.errors import UploadCorrupt


@dataclass(frozen=True, slots=True)
class ReleasedFile:
    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a release consists of, sorted by path."""

    files: tuple[ReleasedFile, ...]

    @property
    def release_id(self) -> str:
        """16 hex digits of the hash over paths, sizes and contents."""
        body = "".join(f"{file.sha256} {file.size} {file.path}\n" for file in self.files)
        return hashlib.sha256(body.encode()).hexdigest()[:16]

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)


def check_path(path: str) -> None:
    """Raise UploadCorrupt unless the path is a plain relative one inside trainer/."""
    pure = PurePosixPath(path)
    if (
        not path
        or pure.is_absolute()
        or str(pure) != path
        or pure.parts[0] != "trainer"
        or len(pure.parts) < 2
        or any(part in (".", "..") or part.startswith("-") for part in pure.parts)
        or any(ord(char) < 32 or ord(char) == 127 for char in path)
    ):
        raise UploadCorrupt(f"the release holds an unsafe path {path!r}", hint="rename the file, then deploy again")


def read_manifest(directory: Path) -> Manifest | None:
    try:
        return records.load(Manifest, files.read_json(directory / "manifest.json"))
    except ValueError:
        return None
