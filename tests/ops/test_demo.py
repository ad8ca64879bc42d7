"""The demo on the stand-in: it finishes by itself, sums up, and says so when a run is already going."""

from __future__ import annotations

import subprocess
import sys

from tests.ops.conftest import Lab
from tests.waiting import PATIENCE_S


def demo(lab: Lab) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dflash_ops.demo"],
        cwd=lab.checkout,
        env=lab.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_from_nothing_to_the_summary(lab: Lab) -> None:
    done = demo(lab)
    assert done.returncode == 0, done.stderr
    assert "step 3 loss 0.333" in done.stdout
    assert "is finished" in done.stdout
    assert "step-00000003" in done.stdout
    assert str(lab.newest().log) in done.stdout
    assert "fab launch --resume auto" in done.stdout


def test_a_run_that_is_going_is_named(lab: Lab) -> None:
    lab.deploy()
    run = lab.launch("standin.steps=1000000")
    done = demo(lab)
    assert done.returncode == 21
    assert run.run_id in done.stderr
    assert "already going" in done.stderr


def test_a_failing_run_fails_the_demo(lab: Lab) -> None:
    lab.hosts_file.write_text(lab.hosts_file.read_text() + "    train: {standin.mode: crash}\n")
    done = demo(lab)
    assert done.returncode == 30
    assert "Traceback" not in done.stderr
