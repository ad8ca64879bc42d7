"""The long measurements: parts under a budget, results on disk at once, and their whole logic on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import many_gpus, one_gpu
from benchmarks.facts import scrub
from benchmarks.many_gpus import splits
from benchmarks.parts import Part, Work, chosen, rows_of, run_parts
from benchmarks.runs import memory_growth
from tests.fixtures import fake_nvidia_smi

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0


def results(out: Path) -> dict[str, Any]:
    """Part name -> what it found."""
    return {part["name"]: part for part in json.loads((out / "results.json").read_text())["parts"]}


def run(parts: list[Part], out: Path, budget_s: float) -> int:
    """As `run_parts`, without keeping its handler of TERM."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        return run_parts(parts, out, budget_s, {"cards": "none"})
    finally:
        signal.signal(signal.SIGTERM, before)


class TestParts:
    def test_each_part_ends_in_its_own_state(self, tmp_path: Path) -> None:
        """Seen to fail with an exception that ends the measurement, and with a broken check that counts as ok."""

        def good(work: Work) -> None:
            work.check("one is one", True)
            work.number("rows", [{"name": "a", "value": 1.5}, {"name": "b", "value": 22}])

        def broken(work: Work) -> None:
            work.check("one is two", False)

        def raises(work: Work) -> None:
            raise ValueError("no such card")

        def long(work: Work) -> None:
            work.number("done", 1)
            work.require(1e6, "the second half")

        parts = [Part(f.__name__, 1, 0.0, f) for f in (good, broken, raises, long)]
        parts.append(Part("hungry", 1, 1e6, good))
        assert run(parts, tmp_path, 600.0) == 1
        found = results(tmp_path)
        states = {name: part["state"] for name, part in found.items()}
        assert states == {
            "good": "ok",
            "broken": "FAILED",
            "raises": "FAILED",
            "long": "cut short",
            "hungry": "skipped",
        }
        assert found["long"]["numbers"] == {"done": 1}
        assert "needs 1000000 s at least" in " ".join(found["hungry"]["notes"])
        table = (tmp_path / "table.txt").read_text()
        assert "BROKEN  one is two" in table
        assert "ValueError: no such card" in table

    def test_time_that_a_part_saves_goes_to_the_next(self, tmp_path: Path) -> None:
        """Seen to fail with a deadline of each part's own share alone."""
        left: list[float] = []
        parts = [Part(name, 1, 0.0, lambda work: left.append(work.left())) for name in ("first", "second", "third")]
        assert run(parts, tmp_path, 3000.0) == 0
        assert left[0] <= 1000
        assert 1500 < left[1] <= 2000
        assert 2500 < left[2] <= 3000

    def test_a_program_that_hangs_is_killed_with_its_children(self, tmp_path: Path) -> None:
        """Seen to fail (the grandchild lives on) with only the child killed."""
        pid_file = tmp_path / "pid"
        code = (
            "import subprocess,sys,time,pathlib; child = subprocess.Popen([sys.executable, '-c', 'import time; "
            f"time.sleep(1000)']); pathlib.Path({str(pid_file)!r}).write_text(str(child.pid)); time.sleep(1000)"
        )
        seen: list[int | None] = []

        def hangs(work: Work) -> None:
            seen.append(work.call([sys.executable, "-c", code], limit_s=5.0).code)

        run([Part("hangs", 1, 0.0, hangs)], tmp_path / "out", 600.0)
        assert seen == [None]
        if pid_file.exists():  # else the machine was so slow that there was nothing to leave behind
            pid = int(pid_file.read_text())
            deadline = time.monotonic() + WAIT_S
            while _lives(pid):
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def test_what_was_found_survives_a_kill(self, tmp_path: Path) -> None:
        """Seen to fail with results written only at a part's end."""
        code = (
            "import pathlib, time; from benchmarks.parts import Part, run_parts\n"
            "def work(w):\n w.number('first', 7); print('found', flush=True); time.sleep(1000)\n"
            f"run_parts([Part('slow', 1, 0.0, work)], pathlib.Path({str(tmp_path)!r}), 600.0, {{}})"
        )
        child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        try:
            assert any("found" in line for line in child.stdout)
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
        assert results(tmp_path)["slow"]["numbers"] == {"first": 7}

    def test_parts_are_chosen_by_name(self) -> None:
        parts = [Part(name, 1, 0.0, lambda work: None) for name in ("facts", "starts", "shapes")]
        assert [p.name for p in chosen(parts, "shapes,facts")] == ["facts", "shapes"]
        assert chosen(parts, "") == parts
        with pytest.raises(SystemExit, match="unknown part strats; the parts are facts, starts, shapes"):
            chosen(parts, "strats")

    def test_rows_are_aligned(self) -> None:
        assert rows_of([{"a": "x", "b": 1}, {"a": "longer", "c": 2.5}]) == [
            "a       b  c",
            "x       1",
            "longer     2.5",
        ]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_growth_of_memory_is_counted_after_step_20_on_every_device() -> None:
    """Seen to fail with the first device alone."""

    def step(number: int, zero: int, one: int) -> dict[str, Any]:
        memory = {"cuda:0": {"reserved": zero, "allocated": 5}, "cuda:1": {"reserved": one, "allocated": 5}}
        return {"step": number, "memory": memory}

    steps = [step(1, 10, 10), step(20, 90, 20), step(21, 100, 30), step(40, 100, 30), step(60, 100, 31)]
    assert memory_growth(steps) == {
        "cuda:0": {"reserved": 0, "allocated": 0},
        "cuda:1": {"reserved": 1, "allocated": 0},
    }
    assert memory_growth(steps[:3]) == {}
    assert memory_growth([{"step": n, "memory": {}} for n in (30, 40)]) == {}


QUERY = """==============NVSMI LOG==============
GPU 00000000:00:06.0
    Product Name                          : NVIDIA H200
    Serial Number                         : 1654923001234
    GPU UUID                              : GPU-1f2e3d4c-5b6a-7988-0a1b-2c3d4e5f6071
    GPU PDI                               : 0x1a2b3c4d5e6f7081
    Board ID                              : 0x600
    Board Part Number                     : 692-2G520-0280-500
    Platform Info
        Chassis Serial Number             : N/A
        Host ID                           : 7
    Fabric
        ClusterUUID                       : 9f8e7d6c-1111-2222-3333-444455556666
    node17.cluster: GPU-1f2e3d4c-5b6a-7988-0a1b-2c3d4e5f6071
"""


class TestScrub:
    def test_serial_numbers_uuids_and_the_host_are_gone_and_the_rest_stays(self) -> None:
        """Seen to fail with any of the three expressions left out."""
        text = scrub(QUERY, "node17.cluster")
        for secret in ("1654923001234", "1f2e3d4c", "1a2b3c4d5e6f7081", "0x600", "9f8e7d6c", "node17"):
            assert secret not in text
        assert text.count("GPU-00000000-0000-4000-8000-000000000000") == 2
        assert "ClusterUUID                       : 0" in text
        for kept in (
            "NVIDIA H200",
            "692-2G520-0280-500",
            "Chassis Serial Number             : N/A",
            "00000000:00:06.0",
        ):
            assert kept in text
        assert scrub(text, "node17.cluster").count("Serial Number                         : 0") == 1

    @given(st.text())
    def test_any_text_passes(self, text: str) -> None:
        assert scrub(scrub(text, "gpu7"), "gpu7") == scrub(text, "gpu7")


def measure(module: str, out: Path, *words: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", module, "--out", str(out), "--budget-s", "900", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return results(out)


@pytest.mark.timeout(1000)
def test_one_gpu_runs_its_logic_on_a_cpu(tmp_path: Path) -> None:
    """Every check holds; seen to fail with a run that ignores TERM, and with a checkpoint that is not written."""
    words = ("--device", "cpu", "--steps", "4", "--starts", "2", "--at-once", "2", "--parts", "thousand,stops,cold")
    found = measure("benchmarks.one_gpu", tmp_path, *words)
    assert {part["state"] for part in found.values()} == {"ok"}
    assert [row["moment"] for row in found["stops"]["numbers"]["stops"]] == ["warm-up", "steady state"]
    assert "4 steps, exit 0, nothing compiled after the gate" in found["thousand"]["checks"]
    assert found["cold"]["numbers"]["starts made"] == {"cold": 2, "warm": 1}
    assert set(found["cold"]["checks"]) == {f"{name}: exit 0, not hung" for name in ("cold-1", "cold-2", "warm-1")}


@pytest.mark.timeout(1000)
def test_many_gpus_runs_its_logic_on_a_cpu(tmp_path: Path) -> None:
    """With a recorded nvidia-smi of two cards in the PATH, whose answers end as fixtures."""
    tools = fake_nvidia_smi.install(tmp_path / "bin", fake_nvidia_smi.TWO_IDLE)
    path = f"{tools.parent}:{os.environ['PATH']}"
    words = ("--devices", "cpu,cpu", "--shape", "tiny", "--starts", "1", "--parts", "facts,starts,pipeline")
    found = measure("benchmarks.many_gpus", tmp_path / "out", *words, PATH=path)
    assert {part["state"] for part in found.values()} == {"ok"}
    assert [card["name"] for card in found["facts"]["numbers"]["cards"]] == ["NVIDIA H200"] * 2
    assert "580.159.04" in (tmp_path / "out" / "smi" / "gpus_idle.csv").read_text()
    assert found["starts"]["numbers"]["starts"][0]["exit"] == 0
    (row,) = found["pipeline"]["numbers"]["context tokens/s"]
    assert row["split"] == "1+1"
    assert row["pipeline"] > 0


@given(count=st.integers(2, 16))
def test_every_split_fills_its_roles_and_fits(count: int) -> None:
    for split in splits(count):
        assert split.targets >= 1
        assert split.drafters >= 1
        assert split.targets + split.drafters + split.verifiers == count


def test_one_device_is_not_several(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.many_gpus", "--out", str(tmp_path), "--devices", "cpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "it takes two devices or more" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--budget-s", "nan"], "above 0"),
        (["--budget-s", "-1"], "above 0"),
        (["--budget-s", "inf"], "above 0"),
        (["--out", "FILE"], "choose a folder"),
        (["--starts", "0"], "at least 1"),
        (["--device", "bogus", "--devices", "bogus,cpu"], "no such device"),
    ],
)
@pytest.mark.parametrize("measure", [one_gpu.main, many_gpus.main])
def test_a_wrong_argument_is_told_before_anything_is_measured(
    measure: Callable[[list[str]], int], words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen to fail: a file as --out was a traceback, NaN seconds had no end, and below none "measured" with exit 0."""
    (tmp_path / "file").touch()
    words = [str(tmp_path / "file") if word == "FILE" else word for word in words]
    if "--device" in words:
        words = words[:2] if measure is one_gpu.main else words[2:]
    with pytest.raises(SystemExit) as ended:
        measure(["--out", str(tmp_path / "out"), *words])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
