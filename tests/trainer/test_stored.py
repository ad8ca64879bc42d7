"""`eval` and `export` over a real checkpoint, and a run that starts from the export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_run import events, run_small, small_config

from trainer.stored import evaluate_checkpoint, export_checkpoint


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    code, _ = run_small(small_config(), directory)
    assert code == 0
    return directory


def test_eval_repeats_what_the_verifier_measured(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails when the checkpoint holds other weights than those that were published for the evaluation."""
    measured = {row["step"]: row for row in events(run_directory, "eval")}[6]
    assert evaluate_checkpoint(str(run_directory / "checkpoints/step-00000006"), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 6
    assert found["accept_len"] == measured["accept_len"]
    assert found["by_position"] == measured["by_position"]


@pytest.mark.parametrize("form", ["zlab", "speculators"])
def test_a_run_starts_from_an_export(run_directory: Path, tmp_path: Path, form: str) -> None:
    checkpoint = run_directory / "checkpoints/step-00000006"
    assert export_checkpoint(str(checkpoint), form=form, out=str(tmp_path / "out"), as_json=True) == 0
    config = small_config({"drafter.init_from": str(tmp_path / "out"), "run.max_steps": "1"})
    code, _ = run_small(config, tmp_path / "next")
    assert code == 0
    first = events(tmp_path / "next", "step")[0]["loss"]
    assert first < events(run_directory, "step")[0]["loss"] - 0.5


def test_what_is_no_checkpoint_is_told_plainly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate_checkpoint(str(tmp_path / "nothing"), as_json=False) == 1
    assert "not a checkpoint directory" in capsys.readouterr().err


def test_an_export_never_overwrites(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = run_directory / "checkpoints/step-00000006"
    assert export_checkpoint(str(checkpoint), form="zlab", out=str(run_directory), as_json=False) == 1
    assert "exists already" in capsys.readouterr().err
