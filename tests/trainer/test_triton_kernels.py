"""Triton kernels without a GPU: computed by Triton's interpreter, and compiled for one that is not there.

Each in a process of its own: the interpreter is chosen when Triton is first imported, and here something else may have
imported it already. It takes Python that the compiler does not, an annotation for one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE_S

CASES = Path(__file__).with_name("triton_cases.py")
ROOT = Path(__file__).parents[2]


def test_they_compile_for_a_hopper_gpu(tmp_path: Path) -> None:
    """Failed with `Any` as the annotation of an argument."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.triton_compile"],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(re.findall("bytes shared", done.stdout)) == 3


def test_the_kernels_equal_plain_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", str(CASES)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"[1-9]\d* passed", done.stdout), done.stdout
