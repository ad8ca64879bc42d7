"""The trainer's code as a release: what is in it, its id, its bytes, and getting it to a target.

The id is the hash of the content, so an unchanged tree is an unchanged release and nothing moves.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.agent import releases
from dflash_ops.agent.releases import Deployed, Manifest, ReleasedFile
from dflash_ops.agent.verbs import InstallRequest, SelectRequest
from dflash_ops.errors import OpsError, UsageError
from dflash_ops.remote import Remote

PACKAGE = "trainer"
EXCLUDED_NAMES = frozenset({"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"})
SELECT_DEADLINE_S = 60.0
INSTALL_DEADLINE_S = 600.0


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


def deploy(remote: Remote, release: Release, who: str, say: Callable[[str], None]) -> Deployment:
    """Make the release current on the target, sending it only if it is not there."""
    release_id = release.release_id
    count = len(release.manifest.files)
    result = remote.call("select", SelectRequest(release_id, who), Deployed, deadline=SELECT_DEADLINE_S)
    if result.present:
        return Deployment(release_id, count, 0, result)
    payload = release.tar()
    say(f"sending {count} files, {len(payload) / 2**20:.1f} MiB")
    result = remote.call(
        "install",
        InstallRequest(release.manifest, who),
        Deployed,
        payload=payload,
        deadline=INSTALL_DEADLINE_S,
        on_progress=say,
    )
    return Deployment(release_id, count, len(payload), result)


def _read(path: Path, name: str) -> tuple[ReleasedFile, bytes]:
    if not path.is_file():
        raise UsageError(f"{path} is not a plain file", hint="remove it from trainer/")
    try:
        content = path.read_bytes()
        releases.check_path(name)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read", why=error.strerror or "") from None
    except OpsError as error:
        raise UsageError(error.what, hint=error.hint) from None
    return ReleasedFile(name, len(content), hashlib.sha256(content).hexdigest()), content
