"""Reading runbooks: their command blocks, where each runs, what it is expected to end with."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECTIONS = ("Symptom", "How to confirm", "Fix", "Verify", "Prevention")
PLACES = ("laptop", "host", "container")
_BLOCK = re.compile(r"^```sh (?P<info>[^\n]+)\n(?P<script>.*?)\n```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Fence:
    """One command block. `runs` is False where it needs real hardware or a person's decision."""

    section: str
    place: str
    script: str
    exit_code: int
    runs: bool

    def check_syntax(self) -> None:
        """Raise where the shell could not parse the block."""
        subprocess.run(["sh", "-n", "-c", self.script], check=True, capture_output=True, timeout=60)


def pages() -> list[Path]:
    """Every runbook, without the index."""
    return sorted(path for path in (ROOT / "runbooks").glob("*.md") if path.name != "README.md")


def fences(path: Path) -> list[Fence]:
    """The command blocks of a page, in order."""
    parts = re.split(r"^## (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = []
    for section, body in zip(parts[1::2], parts[2::2], strict=True):
        for block in _BLOCK.finditer(body):
            place, *words = block["info"].split()
            codes = [int(word[5:]) for word in words if word.startswith("exit=")]
            unknown = [word for word in words if not word.startswith("exit=") and word not in ("hardware", "manual")]
            if unknown:
                raise ValueError(f"{path.name}: unknown words on a block: {unknown}")
            runs = not {"hardware", "manual"} & set(words)
            found.append(Fence(section, place, block["script"], codes[0] if codes else 0, runs))
    return found
