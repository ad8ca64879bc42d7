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


@pytest.mark.parametrize(
    "words",
    [
        ["drafter", "--repeats", "0"],
        ["target", "--documents", "-1"],
        ["target", "--tokens", "-5"],
        ["threads", "--threads", "0"],
        ["threads", "--steps", "-1"],
        ["pipeline", "--steps", "0"],
    ],
)
def test_a_count_below_one_is_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Seen to fail with plain integers: --repeats 0 and --threads 0 ended in tracebacks, --steps 0 took the default."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert "must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["pipeline", "--targets", "bogus"], "'bogus' is no device"),
        (["pipeline", "--targets", "cuda:99", "--drafters", "cuda:99"], "names cuda:99"),
        (["pipeline", "--set", "data.reuse"], "takes KEY=VALUE"),
        (["pipeline", "--set", "nope.key=1"], "unknown setting"),
        (["drafter", "--recompute-mlps", "-1"], "step.recompute_mlps"),
    ],
)
def test_what_cannot_be_configured_is_exit_2_and_a_sentence(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As everywhere in the command line. Seen to fail: the devices were tracebacks, and the others exit 1."""
    assert cli.main(words) == 2
    assert told in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it would run")
@pytest.mark.parametrize("part", ["drafter", "threads"])
def test_a_drafter_of_a_real_shape_is_not_begun_on_a_cpu(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen to fail before it was asked: it built billions of weights and was still at it after 100 s."""
    assert cli.main([part, "--shape", "27b"]) == 1
    assert "needs a CUDA device" in capsys.readouterr().err
