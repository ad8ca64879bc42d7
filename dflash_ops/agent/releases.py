"""Releases on the target: taken in whole and proved, or not at all.

    releases/<id>/trainer/...        the code, as sent
    releases/<id>/manifest.json      path, size and sha256 of every file; the id is the hash of this content
    current -> releases/<id>         what the next launch takes
    previous -> releases/<id>        what `rollback` goes back to

An upload lands in releases/<id>.partial. Only after the count, every size and every hash agree and every Python
file compiles with this very Python does one rename make it a release, and one more make it current.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import tarfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from dflash_ops.agent import files, records, retire
from dflash_ops.agent.layout import RELEASE_ID, Layout, linked_release
from dflash_ops.errors import EnvironmentUnfit, LockHeld, SyntaxCheckFailed, UploadCorrupt, UsageError

DEPLOY_WAIT_S = 30.0
SPARE_BYTES = 16 << 20
"""Free space that must remain after an upload."""


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


@dataclass(frozen=True, slots=True)
class ReleaseInfo:
    """One release for `fab releases`."""

    release_id: str
    deployed_at: float
    files: int
    total_bytes: int
    current: bool
    previous: bool


@dataclass(frozen=True, slots=True)
class Deployed:
    """The end of a deploy, of its first question, or of a rollback."""

    release_id: str
    present: bool
    """The release is on the target, whole."""
    current: str | None
    """The release that the next launch takes."""
    previous: str | None
    changed: bool
    """This call moved `current`."""


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


def damage(layout: Layout, release_id: str) -> str | None:
    """What is wrong with a release on disk; None where every file is as it was sent."""
    directory = layout.release(release_id)
    manifest = read_manifest(directory)
    if manifest is None or manifest.release_id != release_id:
        return "its manifest is missing or altered"
    for file in manifest.files:
        path = directory / file.path
        try:
            if path.is_symlink() or path.stat().st_size != file.size or _sha256(path) != file.sha256:
                return f"{file.path} was changed on the target"
        except OSError as error:
            return f"{file.path}: {error.strerror}"
    return None


def require_whole(layout: Layout) -> str:
    """The current release's id. UsageError where nothing is deployed, UploadCorrupt where it was altered."""
    release_id = linked_release(layout.current)
    if release_id is None:
        raise UsageError("nothing is deployed on this target", hint="`fab deploy` first, or `fab deploy launch`")
    problem = damage(layout, release_id)
    if problem is not None:
        raise UploadCorrupt(f"release {release_id} is not what was deployed", why=problem, hint="`fab deploy` again")
    return release_id


def select(layout: Layout, release_id: str) -> Deployed:
    """Make a release current if it is here and whole; the first question of every deploy."""
    with _deploying(layout):
        if damage(layout, release_id) is not None:
            return _deployed(layout, release_id, present=False, changed=False)
        return _deployed(layout, release_id, present=True, changed=_make_current(layout, release_id))


def install(layout: Layout, manifest: Manifest, payload: BinaryIO, size: int, say: Callable[[str], None]) -> Deployed:
    """Take in an upload of `size` bytes of tar and make it current."""
    release_id = manifest.release_id
    for file in manifest.files:
        check_path(file.path)
    with _deploying(layout):
        partial = layout.releases / f"{release_id}.partial"
        try:
            _require_space(layout, manifest, size)
            partial.mkdir(mode=0o755)
            _unpack(partial, manifest, payload, size)
            say(f"received and verified {len(manifest.files)} files, {manifest.total_bytes} bytes")
            compile_all(partial, manifest)
            say("every Python file compiles")
            files.write_json(partial / "manifest.json", records.dump(manifest), 0o644)
            for directory, _, _ in os.walk(partial):
                files.sync_directory(Path(directory))
            final = layout.release(release_id)
            files.remove_aside(final)  # an altered release of the same id: `select` has refused it
            partial.rename(final)
            files.sync_directory(layout.releases)
        except OSError as error:
            raise files.disk_error(error, f"taking in release {release_id}") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        changed = _make_current(layout, release_id)
        for gone in retire.releases(layout):
            say(f"removed the old release {gone}")
        retire.agents(layout.agents, running=Path(__file__).parents[2])
        return _deployed(layout, release_id, present=True, changed=changed)


def rollback(layout: Layout, release_id: str) -> Deployed:
    """Make `release_id`, or the previous release where it is empty, current."""
    if release_id and not RELEASE_ID.match(release_id):
        raise UsageError(f"{release_id!r} is no release id", hint="`fab releases` lists them")
    with _deploying(layout):
        wanted = release_id or linked_release(layout.previous)
        if wanted is None:
            raise UsageError("there is no previous release to go back to", hint="`fab releases` lists what is there")
        problem = damage(layout, wanted)
        if problem is not None:
            if not layout.release(wanted).exists():
                raise UsageError(f"no release {wanted} on this target", hint="`fab releases` lists them")
            raise UploadCorrupt(f"release {wanted} is damaged", why=problem)
        return _deployed(layout, wanted, present=True, changed=_make_current(layout, wanted))


def listing(layout: Layout) -> list[ReleaseInfo]:
    """Every whole release, newest first."""
    current, previous = linked_release(layout.current), linked_release(layout.previous)
    found = []
    for path in layout.releases.iterdir() if layout.releases.is_dir() else ():
        manifest = read_manifest(path) if RELEASE_ID.match(path.name) else None
        if manifest is not None:
            found.append(
                ReleaseInfo(
                    release_id=path.name,
                    deployed_at=(path / "manifest.json").stat().st_mtime,
                    files=len(manifest.files),
                    total_bytes=manifest.total_bytes,
                    current=path.name == current,
                    previous=path.name == previous,
                )
            )
    return sorted(found, key=lambda info: info.deployed_at, reverse=True)


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


def _unpack(partial: Path, manifest: Manifest, payload: BinaryIO, size: int) -> None:
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


def _require_space(layout: Layout, manifest: Manifest, size: int) -> None:
    space = os.statvfs(layout.releases)
    needed = manifest.total_bytes + SPARE_BYTES
    if space.f_bavail * space.f_frsize < needed or 0 < space.f_favail < len(manifest.files) + 64:
        raise EnvironmentUnfit(
            "no room for the release on the target",
            why=f"{needed >> 20} MiB are needed under {layout.releases}, "
            f"{space.f_bavail * space.f_frsize >> 20} MiB and {space.f_favail} inodes are free",
            hint="free space on the target, then deploy again",
        )


def _make_current(layout: Layout, release_id: str) -> bool:
    current = linked_release(layout.current)
    if current == release_id:
        return False
    if current is not None:
        files.flip_link(layout.previous, f"releases/{current}")
    retire.used(layout.release(release_id))
    files.flip_link(layout.current, f"releases/{release_id}")
    return True


def _deployed(layout: Layout, release_id: str, *, present: bool, changed: bool) -> Deployed:
    return Deployed(release_id, present, linked_release(layout.current), linked_release(layout.previous), changed)


@contextmanager
def _deploying(layout: Layout) -> Iterator[None]:
    """One deploy at a time on a target. Sweeps what a cut one left behind."""
    ends_at = time.monotonic() + DEPLOY_WAIT_S
    while (descriptor := files.try_lock(layout.deploy_lock)) is None:
        if time.monotonic() > ends_at:
            raise LockHeld("another deploy is under way on this target", hint="wait for it, then deploy again")
        time.sleep(0.05)
    try:
        for path in layout.releases.glob("*.partial"):
            shutil.rmtree(path, ignore_errors=True)
        files.sweep_trash(layout.releases)
        yield
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append_audit(layout: Layout, verb: str, who: str, detail: str) -> None:
    """One line in audit.jsonl for every verb that changes the target."""
    line = json.dumps({"time": time.time(), "verb": verb, "who": who, "detail": detail}) + "\n"
    with contextlib.suppress(OSError):  # the work is done; a full disk must not make it look failed
        descriptor = os.open(layout.audit, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
