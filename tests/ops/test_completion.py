"""Shell completion in a real bash: verbs, flags, targets, variants, run ids.

Shown able to fail: with the filter on cached ids taken out, the hostile one reaches the shell.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from dflash_ops import completion
from tests.ops.conftest import Lab
from tests.waiting import PATIENCE_S


def complete(lab: Lab, script: Path, *words: str) -> set[str]:
    """What bash offers for the last word."""
    quoted = " ".join(f"'{word}'" for word in ("fab", *words))
    code = f"source '{script}'; COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _dflash_fab; "
    code += "printf '%s\\n' \"${COMPREPLY[@]}\""
    done = subprocess.run(
        ["bash", "--norc", "-c", code],
        cwd=lab.checkout,
        env=lab.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return set(done.stdout.split())


def test_in_bash(lab: Lab, tmp_path: Path) -> None:
    lab.deploy()
    run = lab.launch("standin.steps=1000000").run_id
    assert lab.fab("runs").returncode == 0
    script = tmp_path / "fab.bash"
    script.write_text(lab.fab("completion").stdout)
    assert complete(lab, script, "tail") == {"tail-log"}
    assert {"deploy", "diagnose", "watch", "prune"} <= complete(lab, script, "")
    assert "--variant" in complete(lab, script, "deploy", "launch", "--")
    assert "--keep-alive" in complete(lab, script, "launch", "--keep")
    assert complete(lab, script, "-H", "lo") == {"local"}
    assert complete(lab, script, "launch", "--variant", "") == {"threadwarm", "sdpa"}
    assert run in complete(lab, script, "tail-log", "--run", "")
    assert {run, "newest"} <= complete(lab, script, "report", "")
    assert {run, "auto"} <= complete(lab, script, "launch", "--resume", "")


def test_a_broken_or_hostile_cache_offers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert completion.answer("runs") == ["auto"]
    for text in ("", "[]", '{"a": 3}', json.dumps({"a": ["$(reboot)", "x;y", 7]})):
        completion.cache_file().parent.mkdir(exist_ok=True)
        completion.cache_file().write_text(text)
        assert completion.answer("runs") == ["auto"]
    completion.remember("a", ["20261129T021402Z-threadwarm-9c1e"])
    completion.remember("a", ["20261129T021403Z-threadwarm-9c1e"])
    assert completion.answer("runs")[1] == "20261129T021403Z-threadwarm-9c1e"
    assert completion.answer("nonsense") == []
