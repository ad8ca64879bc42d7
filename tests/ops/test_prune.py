"""`fab prune`: what may go, and that the last good checkpoint never does.

Shown able to fail: with `damage` always None, the run whose newest checkpoints are damaged loses its last good one.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ops.agent import prune
from dflash_ops.agent.prune import PrunePlan, PruneRequest, damage
from tests.ops.conftest import Lab


def checkpoint(directory: Path, step: int, *, damaged: bool = False) -> str:
    path = directory / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    data = bytes([step % 256]) * 1000
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "model.safetensors").write_bytes(data[:500] if damaged else data)
    (path / "state.json").write_text(json.dumps({"files": {"model.safetensors": entry}}))
    return path.name


@pytest.fixture
def run(lab: Lab) -> Path:
    lab.deploy()
    lab.start("standin.steps=1")
    lab.wait_for("finished")
    directory = Path(lab.newest().directory)
    for path in (directory / "checkpoints").iterdir():
        (path / "state.json").unlink()
        path.rmdir()
    return directory


def planned(lab: Lab, keep: int = 2) -> PrunePlan:
    return prune.prune(lab.layout, PruneRequest("me", keep), lambda text: None)


def names(plan: PrunePlan) -> set[str]:
    return {candidate.path.rpartition("/")[2] for candidate in plan.candidates}


def test_the_newest_and_the_best_stay(lab: Lab, run: Path) -> None:
    for step in range(1, 7):
        checkpoint(run, step)
    (run / "checkpoints" / "best").symlink_to("step-00000002")
    assert names(planned(lab)) == {"step-00000001", "step-00000003", "step-00000004"}
    assert planned(lab).kept == 3


def test_the_last_good_one_stays(lab: Lab, run: Path) -> None:
    checkpoint(run, 1)
    checkpoint(run, 2)
    for step in (3, 4):
        checkpoint(run, step, damaged=True)
    assert names(planned(lab)) == {"step-00000001"}
    assert names(planned(lab, keep=1)) == {"step-00000001", "step-00000003"}


def test_where_none_is_whole_nothing_goes(lab: Lab, run: Path) -> None:
    for step in range(1, 5):
        checkpoint(run, step, damaged=True)
    assert names(planned(lab)) == set()


def test_half_written_ones_go(lab: Lab, run: Path) -> None:
    checkpoint(run, 1)
    (run / "checkpoints" / ".partial-step-00000002-77").mkdir()
    assert names(planned(lab)) == {".partial-step-00000002-77"}


def test_a_live_run_is_left_alone(lab: Lab, run: Path) -> None:
    lab.launch("standin.steps=1000000")
    live = Path(lab.newest().directory)
    for step in range(1, 7):
        checkpoint(live, step)
    assert names(planned(lab, keep=1)) == set()


def test_it_asks_before_it_removes(lab: Lab, run: Path) -> None:
    for step in range(1, 5):
        checkpoint(run, step)
    assert lab.fab("prune", "--dry-run").returncode == 0
    refused = lab.fab("prune")
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert len(list((run / "checkpoints").iterdir())) == 4
    done = lab.fab("prune", "--yes")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-00000003", "step-00000004"}
    assert "prune" in lab.layout.audit.read_text()
    assert lab.fab("prune", "--keep", "0").returncode == 2


def test_only_what_was_planned_may_go(lab: Lab, run: Path) -> None:
    for step in range(1, 5):
        checkpoint(run, step)
    said: list[str] = []
    asked = (f"{run.name}/checkpoints/step-00000004", "../../etc", f"{run.name}", "/etc", "")
    done = prune.prune(lab.layout, PruneRequest("me", 2, asked), said.append)
    assert done.removed == ()
    assert len(said) >= len(asked)
    assert len(list((run / "checkpoints").iterdir())) == 4


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_state_file_is_judged(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    directory = tmp_path_factory.mktemp("c")
    (directory / "state.json").write_bytes(data)
    assert damage(directory) is None or isinstance(damage(directory), str)
