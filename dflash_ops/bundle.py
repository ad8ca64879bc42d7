"""The agent as one file: a reproducible zip that Python can import from, named by its sha256."""

from __future__ import annotations

import functools
import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent
SHARED = ("__init__.py", "errors.py", "events.py", "health.py", "preflight.py")
"""Modules of the laptop's side that the agent uses too; standard library only."""
EPOCH = (1980, 1, 1, 0, 0, 0)
TMUX_LIBRARY_EXTRAS = ("test/", "pytest_plugin.py")  # libtmux's own test support needs pytest


@dataclass(frozen=True, slots=True)
class Bundle:
    """The agent's bytes and their name."""

    data: bytes
    sha256: str


@functools.cache
def agent_bundle() -> Bundle:
    """The agent, what it shares with the laptop, and libtmux. The same sources give the same bytes."""
    import libtmux  # the installed copy is what is shipped; nothing else here needs it

    files: dict[str, Path] = {}
    shipped = [PACKAGE / name for name in SHARED]
    for directory in ("agent", "incidents"):
        shipped.extend(sorted((PACKAGE / directory).rglob("*.py")))
    for path in shipped:
        files[f"dflash_ops/{path.relative_to(PACKAGE).as_posix()}"] = path
    library = Path(libtmux.__file__).parent
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        if not name.startswith(TMUX_LIBRARY_EXTRAS):
            files[f"libtmux/{name}"] = path
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, EPOCH)
            info.external_attr = 0o644 << 16
            archive.writestr(info, files[name].read_bytes(), zipfile.ZIP_DEFLATED, compresslevel=6)
        main = zipfile.ZipInfo("__main__.py", EPOCH)
        archive.writestr(main, b"from dflash_ops.agent.__main__ import main\n\nmain()\n")
    data = buffer.getvalue()
    return Bundle(data, hashlib.sha256(data).hexdigest())
