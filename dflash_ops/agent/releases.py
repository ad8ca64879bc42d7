"""Releases on the target: taken in whole and proved, or not at all.

    releases/<id>/trainer/...        the code, as sent
    releases/<id>/manifest.json      path, size and sha256 of every file; the id is the hash of this content
    current -> releases/<id>         what the next launch takes
    previous -> releases/<id>        what `rollback` goes back to

An upload lands in releases/<id>.partial. Only after the count, every size and every hash agree and every Python
file compiles with this very Python does one rename make it a release, and one more make it current.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dflash_ops.agent import files, records, retire, upload
from dflash_ops.agent.layout import RELEASE_ID, Layout, linked_release
from dflash_ops.agent.manifest import Manifest, check_path, read_manifest
from dflash_ops.errors import LockHeld, UploadCorrupt, UsageError

DEPLOY_WAIT_S = 30.0


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
            upload.require_space(layout.releases, manifest)
            partial.mkdir(mode=0o755)
            upload.unpack(partial, manifest, payload, size)
            say(f"received and verified {len(manifest.files)} files, {manifest.total_bytes} bytes")
            upload.compile_all(partial, manifest)
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
