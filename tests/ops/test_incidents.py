"""The catalogue and its diagnosis, on recorded evidence, on healthy logs and on garbage.

Shown able to fail: with rule 1 (`explains`) off, `uvm-missing.start` is taken for a stopped container; with the
survival rule off, `healthy/autotune-survived-oom` becomes a CUDA OOM.
"""

from __future__ import annotations

import ast
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ops import errors
from dflash_ops.diagnose import failure_text
from dflash_ops.incidents import CATALOGUE, Diagnosis, Evidence, NoMatch, Source, diagnose

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "tests" / "fixtures" / "logs"
INCIDENTS = sorted((LOGS / "incidents").glob("*.txt"))
HEALTHY = sorted((LOGS / "healthy").glob("*.txt"))


def read(path: Path) -> Evidence:
    return Evidence.from_bundle(path.read_text(encoding="utf-8"))


REQUIRED = [
    "compile-race",
    "dense-attention",
    "graph-tree-thread",
    "recompile-limit",
    "cuda-oom",
    "host-oom",
    "memory-throttled",
    "nan-loss",
    "no-valid-anchors",
    "data-refused",
    "missing-fast-kernels",
    "driver-mismatch",
    "uvm-missing",
    "gpu-lost",
    "gpu-busy",
    "disk-full",
    "stale-partial-release",
    "lock-held",
    "tmux-socket-lost",
    "container-stopped",
    "container-restarted",
    "host-unreachable",
    "host-key",
    "corrupt-compile-cache",
    "environment-mismatch",
    "checkpoint-corrupt",
]


def test_the_catalogue_names_every_known_incident_once() -> None:
    names = [incident.name for incident in CATALOGUE]
    assert len(names) == len(set(names))
    assert set(names) >= set(REQUIRED)


def test_every_incident_has_recorded_evidence() -> None:
    recorded = {path.stem.split(".")[0] for path in INCIDENTS}
    assert recorded == {incident.name for incident in CATALOGUE}


def test_what_an_incident_explains_exists_and_is_not_itself() -> None:
    names = {incident.name for incident in CATALOGUE}
    for incident in CATALOGUE:
        assert set(incident.explains) <= names - {incident.name}, incident.name


@pytest.mark.parametrize("path", INCIDENTS, ids=lambda path: path.stem)
def test_recorded_evidence_is_diagnosed(path: Path) -> None:
    evidence = read(path)
    found = diagnose(evidence)
    assert isinstance(found, Diagnosis)
    assert found.incident.name == path.stem.split(".")[0]
    assert found.proof, "a diagnosis without proof convinces nobody"
    for line in found.proof:
        assert line in evidence.lines(line.source)


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_healthy_logs_have_no_diagnosis(path: Path) -> None:
    found = diagnose(read(path))
    assert isinstance(found, NoMatch), f"{found.incident.name}: {[str(line) for line in found.proof]}"


def test_there_are_enough_healthy_logs() -> None:
    assert len(HEALTHY) >= 10


def test_no_match_shows_the_newest_lines() -> None:
    found = diagnose(Evidence.of(log="\n".join(f"line {n}" for n in range(1, 50)), log_first_line=100))
    assert isinstance(found, NoMatch)
    assert str(found.last_lines[-1]) == "train.log:148: line 49"


def test_line_numbers_are_those_of_the_whole_file() -> None:
    found = diagnose(Evidence.of(log="fine\nOSError: [Errno 28] No space left on device", log_first_line=9001))
    assert isinstance(found, Diagnosis)
    assert [line.number for line in found.proof] == [9002]


def test_an_error_that_the_trainer_outlived_is_no_incident() -> None:
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    later = "\n".join(f"step {n} loss 3.1" for n in range(3))
    assert isinstance(diagnose(Evidence.of(log=f"{error}\n{later}")), NoMatch)
    assert isinstance(diagnose(Evidence.of(log=f"{later}\n{error}\nstep 3 loss 3.0")), Diagnosis)


def test_a_run_that_ended_with_0_had_no_fatal_incident() -> None:
    log = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert isinstance(diagnose(Evidence.of(log=log, exit_record='{"code": 0, "signal": null}')), NoMatch)
    assert isinstance(diagnose(Evidence.of(log=log, exit_record='{"code": 1, "signal": null}')), Diagnosis)
    assert isinstance(diagnose(Evidence.of(log=log, exit_record='{"code": 0, "sig')), Diagnosis)


def test_the_first_error_wins_among_equals() -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    fault = "CUDA error: an illegal memory access was encountered"
    first = diagnose(Evidence.of(log=f"{oom}\n{fault}"))
    second = diagnose(Evidence.of(log=f"{fault}\n{oom}"))
    assert isinstance(first, Diagnosis)
    assert isinstance(second, Diagnosis)
    assert (first.incident.name, second.incident.name) == ("cuda-oom", "cuda-fault")
    assert [incident.name for incident in first.others] == ["cuda-fault"]


@pytest.mark.parametrize("path", INCIDENTS + HEALTHY, ids=lambda path: path.stem)
def test_a_bundle_survives_the_round_trip(path: Path) -> None:
    evidence = read(path)
    again = Evidence.from_bundle(evidence.to_bundle())
    assert [str(line) for s in Source for line in again.lines(s)] == [
        str(line) for s in Source for line in evidence.lines(s)
    ]


def mutate(rng: random.Random, text: str) -> str:
    """Cut, repeat, flip, splice: what a dropped link or a dying disk does to a text."""
    data = bytearray(text.encode())
    for _ in range(rng.randint(1, 8)):
        kind = rng.randrange(5)
        at = rng.randrange(len(data) + 1)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            data[at:at] = rng.randbytes(rng.randint(1, 40))
        elif kind == 2 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 3:
            data[at:at] = data[max(0, at - 200) : at]
        else:
            del data[at : at + rng.randint(1, 200)]
    return bytes(data).decode("utf-8", "replace")


def test_a_thousand_mutated_inputs_raise_nothing() -> None:
    rng = random.Random(20261129)
    texts = [path.read_text(encoding="utf-8") for path in INCIDENTS + HEALTHY]
    for n in range(1000):
        found = diagnose(Evidence.from_bundle(mutate(rng, texts[n % len(texts)])))
        assert isinstance(found, (Diagnosis, NoMatch))


def refusals_of_data() -> list[str]:
    """What each `raise DataError(...)` of the trainer says, with `x` for what it fills in."""
    found = []
    for path in sorted((ROOT / "trainer" / "data").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                call = node.exc
                if isinstance(call.func, ast.Name) and call.func.id == "DataError":
                    (said,) = call.args
                    assert isinstance(said, ast.JoinedStr), f"{path.name}:{node.lineno}"
                    found.append("".join(map(_filled_in, said.values)))
    return found


def _filled_in(part: ast.expr) -> str:
    if isinstance(part, ast.FormattedValue):
        return "'x'" if part.conversion == ord("r") else "jsonl"
    assert isinstance(part, ast.Constant)
    return str(part.value)


@pytest.mark.parametrize("said", refusals_of_data())
def test_every_refusal_of_data_is_known_by_its_words(said: str) -> None:
    """A run that begins says them without the class's name. Shown able to fail: without the line for tokens of another
    model."""
    log = f"02:14:40 end       error at step 0, exit 1\n02:14:40           {said}"
    found = diagnose(Evidence.of(log=log, exit_record='{"code": 1, "signal": null}'))
    assert isinstance(found, Diagnosis)
    assert found.incident.name in ("data-refused", "no-valid-anchors")
    assert said in found.proof[0].text


@settings(max_examples=200, deadline=None)
@given(*[st.text(max_size=300) for _ in range(5)], st.integers(-5, 10**9))
def test_any_text_is_evidence(log: str, exit_record: str, metrics: str, gpu: str, failure: str, first: int) -> None:
    evidence = Evidence.of(
        log=log, log_first_line=first, exit_record=exit_record, metrics=metrics, gpu=gpu, failure=failure
    )
    assert isinstance(diagnose(evidence), (Diagnosis, NoMatch))


def test_signatures_are_linear_in_the_length_of_a_line() -> None:
    """A megabyte on one line must not stall the diagnosis: lines are searched up to a bound."""
    found = diagnose(Evidence.of(log="a" * 1_000_000 + "\n" + "checkpoint " * 100_000))
    assert isinstance(found, NoMatch)


def test_next_commands_are_fab_commands() -> None:
    for incident in CATALOGUE:
        assert re.match(r"^fab [a-z-]+( |$)", incident.next_command), incident.name


REFUSALS = [
    (errors.LockHeld("another launch or run holds the lock on this target", why="run x, pid 4"), "lock-held"),
    (errors.GateRefused("GPUs: refused", why="card 2: python3 (pid 7) holds 4614 MiB [host]"), "gpu-busy"),
    (errors.EnvironmentUnfit("packages: refused", why="missing: torch; found: python 3.12"), "environment-mismatch"),
    (
        errors.EnvironmentUnfit("packages: refused", why="missing: flash-linear-attention; found: x"),
        "missing-fast-kernels",
    ),
    (errors.EnvironmentUnfit("the disk is full while preparing the run", why="[Errno 28] No space"), "disk-full"),
    (errors.EnvironmentUnfit("no room for the release on the target", why="9 MiB are needed"), "disk-full"),
    (errors.EnvironmentUnfit("disk: refused", why="0.2 GiB and 9 inodes free under /w"), "disk-full"),
    (errors.UploadCorrupt("trainer/x.py arrived altered", why="sha256 0 instead of 1"), "stale-partial-release"),
    (errors.ContainerStopped("container 200 on pve is stopped"), "container-stopped"),
    (
        errors.ContainerStopped("container 200 on pve is stopped", why="Device /dev/nvidia-uvm does not exist"),
        "uvm-missing",
    ),
    (errors.ContainerMissing("no container 200 on pve"), "container-stopped"),
    (errors.HostUnreachable("pve:22 does not answer", why="timed out"), "host-unreachable"),
    (errors.AuthenticationFailed("pve refused every key"), "host-unreachable"),
    (errors.DeadlineExceeded("no answer within 60 s"), "host-unreachable"),
    (errors.HostKeyRefused("pve:22 is not known"), "host-key"),
    (errors.HostKeyChanged("the host key of pve:22 has changed"), "host-key"),
    (errors.AgentFailed("cannot run /nonexistent/python", why="No such file or directory"), "agent-failed"),
    (errors.AgentFailed("Python 3.9 on the target is too old"), "environment-mismatch"),
]


@pytest.mark.parametrize(("error", "name"), REFUSALS, ids=lambda value: getattr(value, "what", value))
def test_our_own_errors_are_evidence(error: errors.OpsError, name: str) -> None:
    found = diagnose(Evidence.of(failure=failure_text(error)))
    assert isinstance(found, Diagnosis)
    assert found.incident.name == name
    better = ("disk-full", "uvm-missing", "missing-fast-kernels", "environment-mismatch")
    assert error.runbook in (None, found.incident.runbook) or name in better
