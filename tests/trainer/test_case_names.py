"""The GPU cases are named in a list that needs no torch; here every name is found, on a machine without a GPU too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.trainer.gpu.names import ON_CPU, ON_ONE_DEVICE, OVER_DEVICES
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
FIND_ALL = "import sys; from tests.trainer.gpu.cases import case; [case(name) for name in sys.argv[3:]]"


def find(*names: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as `cases.py` runs."""
    return subprocess.run(
        [sys.executable, "-c", FIND_ALL, "all", "cpu,cpu", *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_every_name_is_a_case() -> None:
    """Shown able to fail: with a case renamed in its module."""
    done = find(*ON_ONE_DEVICE, *OVER_DEVICES, "first_calls_at_once_without_a_gate")
    assert done.returncode == 0, done.stderr
    assert set(ON_CPU) <= {*ON_ONE_DEVICE, *OVER_DEVICES}


def test_another_name_is_told() -> None:
    done = find("no_such_case")
    assert (done.returncode, "no case 'no_such_case'" in done.stderr) == (1, True)
