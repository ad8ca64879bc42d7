"""The verbs for living with a run: what is happening, what went wrong, what to keep. Thin, like `tasks`."""

from __future__ import annotations

from pathlib import Path

from dflash_ops import console
from dflash_ops import diagnose as diagnosing
from dflash_ops.connect import connect
from dflash_ops.diagnose import Finding
from dflash_ops.errors import UsageError
from dflash_ops.executor import TargetContext
from dflash_ops.scrub import scrub
from dflash_ops.tasks import _fab as fab_words
from dflash_ops.tasks import _only as only
from dflash_ops.tasks import verb


@verb()
def diagnose(c: TargetContext, run: str = "", json: bool = False, evidence: str = "", save: str = "") -> int:
    """Name what went wrong, with proof; --run ID, --json, --save FILE, --evidence FILE replays a saved one."""
    target = only(c, "diagnose")
    finding = diagnosing.replay(target.name, _read(evidence)) if evidence else _find(c, run)
    if save:
        _write(save, scrub(finding.evidence.to_bundle()))
    fab = fab_words(c, target)
    if json:
        console.show_json(diagnosing.as_json(finding, fab))
    else:
        for line in diagnosing.describe(finding, fab):
            console.say(line)
    return 0


def _find(c: TargetContext, run: str) -> Finding:
    target = only(c, "diagnose")
    return diagnosing.find(target, connect(target), run)


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{name}: cannot be read", why=error.strerror or str(error)) from None


def _write(name: str, text: str) -> None:
    path = Path(name)
    try:
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)
    except OSError as error:
        raise UsageError(f"{name}: cannot be written", why=error.strerror or str(error)) from None
