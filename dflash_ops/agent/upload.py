"""Taking in the bytes of a release: room for them, every size and hash, every Python file through the compiler."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import warnings
from pathlib import Path
from typing import BinaryIO

from dflash_ops.agent.manifest import Manifest, ReleasedFile
from dflash_ops.errors import EnvironmentUnfit, SyntaxCheckFailed, UploadCorrupt

SPARE_BYTES = 16 << 20
"""Free space that must remain after an upload."""


def compile_all(directory: Path, manifest: Manifest) -> None:
    """The syntax check: every .py through this Python's compiler, in memory. Raises SyntaxCheckFailed."""
    for file in manifest.files:
        if not file.path.endswith(".py"):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile((directory / file.path).read_bytes(), file.path, "exec", dont_inherit=True)
        except SyntaxError as error:
            text = (error.text or "").strip()
            raise SyntaxCheckFailed(
                f"{file.path}:{error.lineno or 1}: {error.msg}", why=f"line: {text}" if text else ""
            ) from None
        except ValueError as error:  # NUL bytes
            raise SyntaxCheckFailed(f"{file.path}:1: {error}") from None


def unpack(partial: Path, manifest: Manifest, payload: BinaryIO, size: int) -> None:
    """Store `size` bytes of tar under `partial`, each file proved as it lands. Raises UploadCorrupt."""
    expected = {file.path: file for file in manifest.files}
    exact = _Exactly(payload, size)
    try:
        with tarfile.open(fileobj=exact, mode="r|") as archive:
            for member in archive:
                file = expected.pop(member.name, None)
                if file is None or not member.isreg() or member.size != file.size:
                    raise UploadCorrupt(f"the upload holds {member.name!r}, which its manifest does not describe so")
                source = archive.extractfile(member)
                if source is None:
                    raise UploadCorrupt(f"{member.name}: no content")
                _store(partial / file.path, source.read(), file)
        while exact.read(1 << 16):
            pass
    except tarfile.TarError as error:
        raise UploadCorrupt(
            "the upload is cut or damaged", why=f"{exact.taken} of {size} bytes came: {error}"
        ) from None
    if exact.taken != size or expected:
        raise UploadCorrupt(
            "the upload is not whole", why=f"{exact.taken} of {size} bytes, {len(expected)} files missing"
        )


def _store(path: Path, data: bytes, file: ReleasedFile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "w+b") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
        out.seek(0)
        stored = hashlib.sha256(out.read()).hexdigest()  # what the disk gives back, not what was meant
    if stored != file.sha256:
        raise UploadCorrupt(f"{file.path} arrived altered", why=f"sha256 {stored[:12]} instead of {file.sha256[:12]}")


class _Exactly(io.RawIOBase):
    """Reads at most `size` bytes from a stream and counts them; end of input is just a short count."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream = stream
        self._size = size
        self.taken = 0

    def readable(self) -> bool:
        return True

    def read(self, amount: int = -1) -> bytes:
        left = self._size - self.taken
        data = self._stream.read(left if amount < 0 else min(amount, left))
        self.taken += len(data)
        return data


def require_space(releases: Path, manifest: Manifest) -> None:
    """Raises EnvironmentUnfit where the release and some spare would not fit."""
    space = os.statvfs(releases)
    needed = manifest.total_bytes + SPARE_BYTES
    if space.f_bavail * space.f_frsize < needed or 0 < space.f_favail < len(manifest.files) + 64:
        raise EnvironmentUnfit(
            "no room for the release on the target",
            why=f"{needed >> 20} MiB are needed under {releases}, "
            f"{space.f_bavail * space.f_frsize >> 20} MiB and {space.f_favail} inodes are free",
            hint="free space on the target, then deploy again",
        )
