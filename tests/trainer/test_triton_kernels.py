"""Triton kernels without a GPU: their cases in a process where Triton's interpreter runs them.

The interpreter is chosen when Triton is first imported, and here something else may have imported it already.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE_S

CASES = Path(__file__).with_name("triton_cases.py")


def test_the_kernels_equal_plain_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", str(CASES)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"[1-9]\d* passed", done.stdout), done.stdout
