"""The agent compiled once for each Python of a target, instead of again by every call.

    agents/<sha256>.pyz                as shipped; its name is the hash of its content
    agents/<sha256>.<Python>.pyz       a line `# <sha256 of the rest>`, then the same archive with bytecode in it

Python reads an archive behind any first line. The loader (`remote.LOADER`) hashes both at every call and takes the
second only where it is whole; otherwise the first runs, and `write` makes the second anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import marshal
import sys
import zipfile
from pathlib import Path

from dflash_ops.agent import files

UNCHECKED = (1).to_bytes(4, "little")
"""PEP 552: bytecode that is not compared with its source again; the archive's hash covers both."""


def path_of(shipped: Path) -> Path:
    """Where the compiled twin of a shipped agent lies, for this Python."""
    return shipped.with_suffix(f".{sys.implementation.cache_tag}.pyz")


def write(running: Path) -> None:
    """Make the twin of the shipped archive that is running. Where it is the twin itself, or a checkout, nothing."""
    if running.suffix != ".pyz" or "." in running.stem:
        return
    with contextlib.suppress(OSError):  # a full disk, or one that may only be read: calls go on as they are
        twin = path_of(running)
        body = _with_bytecode(running.read_bytes(), twin)
        head = f"# {hashlib.sha256(body).hexdigest()}\n"
        files.write_whole(twin, head.encode() + body)


def _with_bytecode(shipped: bytes, twin: Path) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(shipped)) as sources, zipfile.ZipFile(out, "w") as both:
        for name in sources.namelist():
            source = sources.read(name)
            both.writestr(zipfile.ZipInfo(name), source)
            if name.endswith(".py"):
                code = compile(source, f"{twin}/{name}", "exec", dont_inherit=True)
                header = importlib.util.MAGIC_NUMBER + UNCHECKED + importlib.util.source_hash(source)
                both.writestr(zipfile.ZipInfo(f"{name}c"), header + marshal.dumps(code))
    return out.getvalue()
