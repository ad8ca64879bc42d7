"""The benchmarks' arithmetic, and that they run where there is no GPU. Seen to fail with the head's factor at 6."""

from __future__ import annotations

import json

import pytest
import torch

from trainer.bench import cli
from trainer.bench.peers import PeerUnavailable, install
from trainer.bench.shapes import SHAPES, bench_config, bench_step, model_flops, random_batch


def test_model_flops_of_the_27b_shape_are_the_published_breakdown() -> None:
    """Per 4,096-token document with 512 anchors, in TFLOP: body 78.6, head 41.7, context 3.4."""
    assert model_flops(SHAPES["27b"], 1) / 1e12 == pytest.approx(78.6 + 41.7 + 3.4, rel=0.01)
    assert model_flops(SHAPES["27b"], 4) == pytest.approx(4 * model_flops(SHAPES["27b"], 1))


def test_the_benchmarks_batch_fills_every_slot_and_trains() -> None:
    device, shape = torch.device("cpu"), SHAPES["tiny"]
    config = bench_config(shape, 2, attention="flex", graphs="none", device=device)
    step, batch = bench_step(shape, config, device), random_batch(shape, config, 2, 0, device)
    assert bool(batch.packed.keep_N.all())
    step.load(batch)
    step.accumulate()
    step.apply()
    assert step.metrics().blocks == 2 * shape.anchors


def test_the_command_prints_one_json_line_for_the_machine_and_one_for_each_result(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["drafter", "--shape", "tiny", "--documents", "1", "--repeats", "1", "--json"]) == 0
    head, result = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert head["ceiling_tflops"] > 0
    assert result["of_ceiling"] == pytest.approx(result["tflops"] / head["ceiling_tflops"])
    assert result["graphs"] == "none"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has a result for each kind of graph")
def test_fp8_stands_beside_the_plain_step_of_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["drafter", "--shape", "tiny", "--documents", "1", "--repeats", "1", "--fp8", "--json"]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [result["fp8"] for result in results] == [False, True]
    assert results[1]["first_loss"] == pytest.approx(results[0]["first_loss"], rel=0.02)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it would run")
def test_the_peer_needs_a_gpu_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["peers"]) == 1
    assert "needs a CUDA device" in capsys.readouterr().err


def test_a_peer_that_cannot_be_installed_is_a_clear_error(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(PeerUnavailable, match="could not be installed"):
        install(tmp_path / "peer")
