"""The step, its graphs and its refusals on a real GPU; each case in a process of its own with a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainer.gpu.names import ON_ONE_DEVICE, OVER_DEVICES

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run_case(name: str, limit_s: float = 240.0, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.trainer.gpu.cases", name],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        timeout=limit_s,
        check=False,
    )


@pytest.mark.parametrize("name", ON_ONE_DEVICE)
def test_case(name: str) -> None:
    done = run_case(name)
    print(done.stdout[-4000:])
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.rstrip().endswith("ok")


@pytest.mark.parametrize("name", OVER_DEVICES)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_case_over_devices(name: str) -> None:
    done = run_case(name)
    assert done.returncode == 0, done.stderr[-6000:]


def test_first_calls_at_once_hang_without_a_gate(tmp_path: Path) -> None:
    """The reason for the gate. Where torch has learnt to do this, the gate can go.

    With an empty cache: a cache hit brings the backward along and nothing is left to collide.
    """
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    try:
        done = run_case("first_calls_at_once_without_a_gate", limit_s=150.0, **caches)
    except subprocess.TimeoutExpired:
        return
    assert done.returncode != 0, "four concurrent first calls went through: this torch no longer needs the gate"
    print(done.stderr[-1500:])
    assert "no end in" in done.stderr
