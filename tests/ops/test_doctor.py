"""`fab doctor`: every line it may say, and the whole of it on this machine.

Shown able to fail: with the comparison of drivers by prefix, 580.142 passes for 580.1; with the disk's inodes left
out, the file system without inodes is called fit.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ops.agent import doctor, gpu_log, machine, nvidia_smi
from dflash_ops.agent.doctor import CONVOLUTION, RECURRENCE, DoctorRequest, read_smoke
from dflash_ops.agent.machine import Disk
from dflash_ops.doctor import compare_drivers, laptop
from dflash_ops.incidents import Diagnosis, Evidence, diagnose
from tests.ops.conftest import Lab

GOOD = {"torch": "2.11.0", "cuda": "13.0", "cards": 8, "bad": [], RECURRENCE: True, CONVOLUTION: True}


def verdicts(found: dict[str, object], **expected: object) -> dict[str, str]:
    request = DoctorRequest(**{"gpu_count": 8, **expected})  # type: ignore[arg-type]  # a test's own keywords
    return {line.name: line.verdict for line in read_smoke(found, request, on_gpus=True)}


def test_smoke_lines() -> None:
    assert verdicts(GOOD) == {"torch": "ok", "CUDA": "ok", "fast kernels": "ok"}
    assert verdicts({"error": "ImportError: x"}) == {"torch": "bad"}
    assert verdicts({**GOOD, "cards": 7})["CUDA"] == "bad"
    assert verdicts({**GOOD, "cards": 0}, gpu_count=None)["CUDA"] == "bad"
    assert verdicts({**GOOD, "bad": ["cuda:3: RuntimeError"]})["CUDA"] == "bad"
    assert verdicts({**GOOD, CONVOLUTION: "causal_conv1d: ModuleNotFoundError"})["fast kernels"] == "note"
    slow = {**GOOD, RECURRENCE: "fla: ModuleNotFoundError"}
    assert verdicts(slow)["fast kernels"] == "bad"
    assert verdicts(slow, slow_kernels_allowed=True)["fast kernels"] == "note"
    on_cpu = read_smoke({**GOOD, "cards": 0}, DoctorRequest(), on_gpus=False)
    assert [line.name for line in on_cpu] == ["torch"]


def test_drivers_must_be_equal() -> None:
    assert compare_drivers("580.159.04", "580.159.04").verdict == "ok"
    assert compare_drivers("580.159.04", "580.142").verdict == "bad"
    assert compare_drivers("580.1", "580.142").verdict == "bad"


def test_the_laptop_has_its_pins() -> None:
    assert {line.verdict for line in laptop()} == {"ok"}


def test_a_disk_without_inodes_is_full() -> None:
    assert Disk("/w", 1 << 40, 1 << 41, 3, 1000).full
    assert Disk("/w", 1 << 20, 1 << 41, 900, 1000).full
    assert not Disk("/w", 1 << 40, 1 << 41, 0, 0).full


def test_memory_of_both_cgroup_versions(tmp_path: Path) -> None:
    two = tmp_path / "v2"
    two.mkdir()
    for name, text in (
        ("memory.current", "100\n"),
        ("memory.max", "max\n"),
        ("memory.events", "low 0\nhigh 7\noom_kill 2\n"),
    ):
        (two / name).write_text(text)
    assert machine.memory(two) == machine.Memory(100, None, 7, 2)
    one = tmp_path / "v1" / "memory"
    one.mkdir(parents=True)
    (one / "memory.usage_in_bytes").write_text("100")
    (one / "memory.limit_in_bytes").write_text(str((1 << 63) - 4096))
    (one / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert machine.memory(one.parent) == machine.Memory(100, None, None, 1)
    assert machine.memory(tmp_path / "nothing") == machine.Memory()


def test_doctor_on_this_machine(lab: Lab) -> None:
    done = lab.fab("doctor", "--quick", "--json")
    body = json.loads(done.stdout)
    names = {(line["place"], line["name"]): line["verdict"] for line in body["lines"]}
    assert done.returncode == 0, [line for line in body["lines"] if line["verdict"] == "bad"]
    assert body["fit"] is True
    assert {("laptop", "fabric"), ("container", "packages"), ("container", "memory"), ("both", "clock")} <= set(names)
    table = lab.fab("doctor", "--quick").stdout
    assert "workspace" in table
    assert "verdict" in table


def test_a_short_disk_is_a_fault_with_a_fix(lab: Lab) -> None:
    lab.hosts_file.write_text(lab.hosts_file.read_text().replace("min_free_gib: 0", "min_free_gib: 999999"))
    done = lab.fab("doctor", "--quick")
    assert done.returncode == 24
    assert "runbooks/disk-full.md" in done.stdout


def test_a_target_that_does_not_answer_leaves_the_laptop_s_lines(lab: Lab) -> None:
    text = lab.hosts_file.read_text()
    lab.hosts_file.write_text(text.replace("    via: local\n", "    via: local\n    python: /nonexistent/python\n"))
    done = lab.fab("doctor", "--quick")
    assert done.returncode == 14
    assert "fabric" in done.stdout
    assert "Traceback" not in done.stderr


def test_the_smoke_test_runs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SMOKE", 'print(\'@{"torch": "9", "cuda": null, "cards": 0, "bad": []}\')')
    (line,) = doctor.smoke(DoctorRequest(), on_gpus=False)
    assert line.verdict == "ok"
    monkeypatch.setattr(doctor, "SMOKE", "import os; os.abort()")
    (line,) = doctor.smoke(DoctorRequest(), on_gpus=False)
    assert line.verdict == "bad"
    compile(doctor.SMOKE, "smoke", "exec")


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=400))
def test_nvidia_smi_may_say_anything(text: str) -> None:
    for said in (text, "index, uuid, memory.used [MiB]\n" + text, text.replace("a", ", GPU-")):
        try:
            for reading in gpu_log.parse(said):
                assert reading.uuid
        except nvidia_smi.Fault:
            pass
        assert diagnose(Evidence.of(gpu=said)) is not None


def test_a_lost_card_is_named_from_what_nvidia_smi_says() -> None:
    found = diagnose(Evidence.of(gpu="Unable to determine the device handle for GPU0: 0000:5D:00.0: Unknown Error"))
    assert isinstance(found, Diagnosis)
    assert found.incident.name == "gpu-lost"
