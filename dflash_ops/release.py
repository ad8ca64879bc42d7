"""The trainer's code as a release: what is in it, its id, its bytes, and getting it to a target.

The id is the hash of the content, so an unchanged tree is an unchanged release and nothing moves.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.agent.manifest import Manifest, ReleasedFile, check_path
from dflash_ops.agent.messages import Current, InstallRequest, Nothing, Releases, SelectRequest
from dflash_ops.agent.releases import Deployed
from dflash_ops.errors import OpsError, UsageError
from dflash_ops.remote import Remote

PACKAGE = "trainer"
EXCLUDED_NAMES = frozenset({"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"})
SELECT_DEADLINE_S = 60.0
INSTALL_DEADLINE_S = 600.0

Upload = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows an upload of so many bytes under a title; the function it gives is told how many have left."""


@dataclass(frozen=True, slots=True)
class Release:
    """A release in memory: its manifest and every file's bytes, in the manifest's order."""

    manifest: Manifest
    contents: tuple[bytes, ...]

    @property
    def release_id(self) -> str:
        return self.manifest.release_id

    def tar(self) -> bytes:
        """A reproducible tar: sorted, owned by root, dated 1970, mode 644."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for file, content in zip(self.manifest.files, self.contents, strict=True):
                info = tarfile.TarInfo(file.path)
                info.size = file.size
                info.mode = 0o644
                archive.addfile(info, io.BytesIO(content))
        return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a deploy did. `sent` is the number of bytes that moved."""

    release_id: str
    files: int
    sent: int
    result: Deployed


def collect(checkout: Path) -> Release:
    """Read trainer/ of a checkout. Raises UsageError on links, special files and unsafe names."""
    package = checkout / PACKAGE
    if not (package / "__init__.py").is_file():
        raise UsageError(f"{package} is not the trainer's package", hint="run from a checkout of dflash-ops")
    found: list[tuple[ReleasedFile, bytes]] = []
    for directory, names, file_names in os.walk(package):
        names[:] = sorted(name for name in names if name not in EXCLUDED_NAMES)
        for name in [*names, *file_names]:
            if (Path(directory) / name).is_symlink():
                raise UsageError(
                    f"{Path(directory) / name} is a symbolic link; a release holds plain files only",
                    hint="replace the link by the file itself",
                )
        for name in file_names:
            path = Path(directory) / name
            if name.endswith(".pyc") or name in EXCLUDED_NAMES:
                continue
            found.append(_read(path, path.relative_to(checkout).as_posix()))
    found.sort(key=lambda pair: pair[0].path)
    return Release(Manifest(tuple(file for file, _ in found)), tuple(content for _, content in found))


@dataclass(frozen=True, slots=True)
class Plan:
    """What a deploy would do. `changes` has one line for each file that differs."""

    release_id: str
    current: str | None
    changes: tuple[str, ...]
    sends: int
    """Bytes; 0 where nothing would be sent."""
    commands: tuple[tuple[str, ...], ...]
    """What the first machine of the route would run, in order; the nonce differs each time."""


def plan(remote: Remote, release: Release) -> Plan:
    """Look, and change nothing (the agent itself is put on the target if it is not there yet)."""
    current = remote.call("current", Nothing(), Current, deadline=SELECT_DEADLINE_S)
    there = {file.path: file for file in current.manifest.files} if current.manifest else {}
    here = {file.path: file for file in release.manifest.files}
    changes = []
    for path in sorted(there.keys() | here.keys()):
        old, new = there.get(path), here.get(path)
        if old is None and new is not None:
            changes.append(f"+ {path} ({new.size:,} bytes)")
        elif new is None:
            changes.append(f"- {path}")
        elif old is not None and old.sha256 != new.sha256:
            changes.append(f"~ {path} ({old.size:,} -> {new.size:,} bytes)")
    listed = remote.call("releases", Nothing(), Releases, deadline=SELECT_DEADLINE_S).releases
    known = release.release_id in [info.release_id for info in listed]
    verbs = [("select", SELECT_DEADLINE_S)] + ([] if known else [("install", INSTALL_DEADLINE_S)])
    commands = [remote.route_argv(verb, deadline) for verb, deadline in verbs]
    sends = 0 if known else len(release.tar())
    return Plan(release.release_id, current.release_id, tuple(changes), sends, tuple(commands))


def deploy(remote: Remote, release: Release, who: str, say: Callable[[str], None], upload: Upload) -> Deployment:
    """Make the release current on the target, sending it only if it is not there."""
    release_id = release.release_id
    count = len(release.manifest.files)
    result = remote.call("select", SelectRequest(release_id, who), Deployed, deadline=SELECT_DEADLINE_S)
    if result.present:
        return Deployment(release_id, count, 0, result)
    payload = release.tar()
    with upload(f"sending {count} files", len(payload)) as on_sent:
        result = remote.call(
            "install",
            InstallRequest(release.manifest, who),
            Deployed,
            payload=payload,
            deadline=INSTALL_DEADLINE_S,
            on_progress=say,
            on_sent=on_sent,
        )
    return Deployment(release_id, count, len(payload), result)


def _read(path: Path, name: str) -> tuple[ReleasedFile, bytes]:
    if not path.is_file():
        raise UsageError(f"{path} is not a plain file", hint="remove it from trainer/")
    try:
        content = path.read_bytes()
        check_path(name)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read", why=error.strerror or "") from None
    except OpsError as error:
        raise UsageError(error.what, hint=error.hint) from None
    return ReleasedFile(name, len(content), hashlib.sha256(content).hexdigest()), content
