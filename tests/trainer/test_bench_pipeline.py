"""`bench pipeline` runs the real threads where there is no GPU, and its bounds are those of the devices it is given.

Shown able to fail: timed to its very end (where drafters have no target beside them any more) the run has 20 timed
steps; with one seed for all rows the rows are equal.
"""

from __future__ import annotations

import json

import pytest
import torch

from trainer import torch_setup
from trainer.bench import cli
from trainer.bench.measure import BenchError
from trainer.bench.pipeline import MARKS, bound_of, pipeline_config
from trainer.bench.synthetic import SyntheticRows
from trainer.bench.threads import ThreadsRatio, ThreadsResult
from trainer.data.batch import PackedBatch


def test_the_command_measures_both_stages_and_then_the_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pipeline", "--shape", "tiny", "--documents", "1", "--repeats", "1", "--steps", "1", "--json"]
    if torch.cuda.is_available():
        pytest.skip("on a GPU it is run for its numbers")
    assert cli.main(words) == 0
    head, found = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    target, drafter = found["target_tokens_per_s"], found["drafter_tokens_per_s"]
    assert found["bound"] == "harmonic"
    assert found["bound_tokens_per_s"] == pytest.approx(target * drafter / (target + drafter))
    assert found["of_bound"] == pytest.approx(found["pipeline_tokens_per_s"] / found["bound_tokens_per_s"])
    assert found["pipeline_tokens_per_s"] > 0
    assert found["recompiles"] == 0
    assert found["steps"] == 15
    assert found["ceiling_tflops"] == head["ceiling_tflops"]
    assert "share cores" in found["note"]
    assert torch_setup._at_the_gate is None  # the ban on compiling ended with the run


def test_a_shape_of_gigabytes_is_refused_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pipeline", "--shape", "8b", "--targets", "cpu", "--drafters", "cpu"]) == 1
    assert "needs a CUDA device" in capsys.readouterr().err


def test_one_device_adds_up_devices_of_their_own_do_not_and_anything_else_is_refused() -> None:
    assert bound_of(["cuda:0"], ["cuda:0", "cuda:0"]) == "harmonic"
    assert bound_of(["cuda:0", "cuda:1"], ["cuda:2"]) == "slower stage"
    with pytest.raises(BenchError, match="cuda:0, cuda:1"):
        bound_of(["cuda:0", "cuda:1"], ["cuda:1"])


def test_what_targets_are_ahead_by_fits_into_one_stretch() -> None:
    """Else the timed steps would begin while channels fill, or end while drafters finish alone."""
    config = pipeline_config("tiny", 1, ["cpu"] * 4, ["cpu"], 6)
    assert config.run.log_every > (config.run.queue_depth + 1) * 4
    assert config.run.max_steps == MARKS * config.run.log_every
    assert pipeline_config("tiny", 1, ["cpu"], ["cpu"], 600).run.max_steps == 600


def test_rows_are_full_differ_and_carry_the_runs_numbers() -> None:
    config = pipeline_config("tiny", 2, ["cpu"], ["cpu"], 30)
    source = SyntheticRows(config, vocab_size=4096, documents=2)
    rows: list[PackedBatch] = [next(source) for _ in range(5)]
    assert [row.index for row in rows] == [0, 1, 2, 3, 4]
    assert torch.equal(rows[0].input_ids_T, rows[4].input_ids_T)
    assert not torch.equal(rows[0].input_ids_T, rows[1].input_ids_T)
    for row in rows:
        assert (row.tokens, row.documents) == (config.data.token_budget, 2)
        assert bool(row.keep_N.all())


def test_graphs_are_compared_within_one_run() -> None:
    plain = ThreadsResult("8b", 4, "none", 100.0, 40.0, 9.0, 500.0)
    graphed = ThreadsResult("8b", 4, "step", 80.0, 50.0, 0.9, 500.0)
    assert ThreadsRatio.of(plain, graphed) == ThreadsRatio("8b", 4, pytest.approx(1.25), pytest.approx(0.1))
