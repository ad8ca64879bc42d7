"""`make bench`: which commands it runs, and how their lines become one table.

Shown able to fail: with the failed command's error dropped, its row says nothing; with a part missing in `row_of`, its
line raises KeyError here and not after an hour of measuring.
"""

from __future__ import annotations

from dataclasses import asdict

import pytest

from benchmarks import table
from trainer.bench.drafter import DrafterResult
from trainer.bench.pipeline import PipelineResult
from trainer.bench.target import TargetResult
from trainer.bench.threads import ThreadsRatio, ThreadsResult


def example(kind: type) -> dict[str, object]:
    """Any values of the right types: the field names are what must agree."""
    words = {"str": "x", "int": 3, "float": 2.0, "bool": True}
    fields = kind.__dataclass_fields__  # type: ignore[attr-defined]  # every kind here is a dataclass
    return {name: words.get(str(field.type), {}) for name, field in fields.items()}


@pytest.mark.parametrize(
    ("part", "kind", "shown"),
    [
        ("drafter", DrafterResult, "200% of the ceiling"),
        ("target", TargetResult, "2.00 x transformers' own forward"),
        ("target", TargetResult, "by x, compiled, fp8"),
        ("drafter", DrafterResult, "graphs x, fp8"),
        ("pipeline", PipelineResult, "200% of the bound (x)"),
        ("threads", ThreadsResult, "3 threads, graphs x"),
        ("threads", ThreadsRatio, "replay 2.00 x plain"),
    ],
)
def test_every_result_has_its_line(part: str, kind: type, shown: str) -> None:
    (_, _, line) = table.table([table.row_of(part, example(kind))])
    assert line.startswith(part)
    assert shown in line


def test_a_failed_benchmark_keeps_its_reason_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = asdict(ThreadsRatio("tiny", 4, 1.5, 0.1))
    head = {"card": "CPU", "torch": "2", "ceiling_tflops": 0.5}
    answers = {"pipeline": ([head], "error: no room"), "threads": ([head, good], None)}
    monkeypatch.setattr(table, "run", lambda words: answers[words[0]])
    assert table.main(["--part", "pipeline", "threads", "--shape", "tiny"]) == 1
    out = capsys.readouterr().out
    assert "error: no room" in out
    assert "replay 1.50 x plain" in out
    assert out.startswith("CPU, torch 2, matmul 0.5 to 0.5 TFLOP/s")


def test_a_command_that_cannot_run_says_why() -> None:
    lines, error = table.run(["pipeline", "--targets", "cpu", "--drafters", "cpu", "--shape", "8b", "--json"])
    assert [sorted(line) for line in lines] == [["card", "ceiling_tflops", "torch"]]
    assert error is not None
    assert "needs a CUDA device" in error


def test_what_is_run_where() -> None:
    assert table.command("threads", "27b", [4], on_gpu=True) is None
    assert table.command("pipeline", "27b", [4], on_gpu=True) == [
        "pipeline",
        "--shape",
        "27b",
        "--documents",
        "4",
        "--json",
    ]
    assert (table.command("target", "8b", [4], on_gpu=True) or [])[-3:] == ["--fp8", "--compile", "--json"]
    assert "--fp8" not in (table.command("drafter", "tiny", [1], on_gpu=False) or [])
    assert "--steps" in (table.command("threads", "tiny", [1], on_gpu=False) or [])
