"""`fab diagnose` and the states of a run, on real processes: a supervisor, a trainer, a full disk, a lost socket.

Shown able to fail: with the lines before the tail not counted, the numbers in a long log are wrong; with every OOM
kill of the machine taken for this run's, a target without a run was diagnosed as out of memory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

from dflash_ops.agent import evidence, process, runs
from dflash_ops.incidents import Source
from tests.checkout import REPOSITORY
from tests.ops.conftest import Lab
from tests.waiting import wait_until


def diagnosed(lab: Lab, *words: str) -> dict[str, Any]:
    done = lab.fab("diagnose", "--json", *words)
    assert done.returncode == 0, done.stderr
    body: dict[str, Any] = json.loads(done.stdout)
    return body


def record(lab: Lab) -> runs.RunRecord:
    found = runs.read_run(Path(lab.newest().directory))
    assert found is not None
    return found


def test_nothing_yet(lab: Lab) -> None:
    body = diagnosed(lab)
    assert body["run"] is None
    assert body["incident"] is None


def test_a_healthy_run_and_a_finished_one(lab: Lab) -> None:
    lab.deploy()
    lab.launch("standin.steps=1000000")
    assert diagnosed(lab)["incident"] is None
    assert "incident  none\n" in lab.fab("diagnose").stdout
    assert lab.fab("stop").returncode == 0
    body = diagnosed(lab)
    assert (body["state"], body["detail"], body["incident"]) == ("finished", "stopped on request", None)


def test_a_crash_that_nobody_knows_shows_its_last_lines(lab: Lab) -> None:
    lab.deploy()
    lab.start("standin.mode=crash")
    lab.wait_for("failed")
    body = diagnosed(lab)
    assert body["incident"] is None
    assert any("bad luck" in line["text"] for line in body["last_lines"])


def test_the_real_trainer_s_refusal_of_a_file_is_named_in_its_words(lab: Lab) -> None:
    """Shown able to fail: without the incident this was "none that is known"."""
    shutil.rmtree(lab.checkout / "trainer")
    shutil.copytree(REPOSITORY / "trainer", lab.checkout / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    data = lab.home / "part-03.parquet"
    data.write_text("cut")
    lab.deploy()
    lab.start(f"data.source={data}", "run.tensorboard=false")
    status = lab.wait_for("failed")
    body = diagnosed(lab)
    assert (body["run"], body["incident"]) == (status.run_id, "data-refused")
    words = f"{data} cannot be read as parquet: "
    assert [words in line["text"] for line in body["proof"]] == [True]
    assert body["proof"][0]["source"] == "train.log"
    said = lab.fab("diagnose").stdout
    assert words in said
    assert "runbook   runbooks/data-refused.md\n" in said


def test_a_killed_trainer_is_killed(lab: Lab) -> None:
    lab.deploy()
    lab.launch("standin.steps=1000000")
    trainer = record(lab).trainer
    assert trainer is not None
    process.send(trainer, signal.SIGKILL)
    assert wait_until(lambda: lab.newest().state == "killed", "killed")
    assert lab.newest().detail == "ended by SIGKILL"
    assert diagnosed(lab)["incident"] == "run-lost"


def test_a_killed_supervisor_is_lost_and_resume_goes_on(lab: Lab) -> None:
    lab.deploy()
    lab.launch("standin.steps=1000000")
    supervisor = record(lab).supervisor
    assert supervisor is not None
    process.send(supervisor, signal.SIGKILL)
    wait_until(lambda: lab.newest().state == "lost", "lost")
    body = diagnosed(lab)
    assert body["incident"] == "run-lost"
    assert any(line["source"] == "facts" for line in body["proof"])
    assert body["next"] == f"fab launch --resume {body['run']}"
    # The trainer was told to stop by the kernel, so it has saved: the next command works.
    wait_until(lambda: (Path(lab.newest().directory) / "checkpoints").is_dir(), "the checkpoint")
    assert lab.fab("launch", "--resume", body["run"]).returncode == 0


def test_a_container_restart_is_lost(lab: Lab) -> None:
    """Played by what a restart leaves behind: a record of another boot. The sandbox restarts a real container."""
    lab.deploy()
    lab.start("standin.steps=1")
    lab.wait_for("finished")
    directory = Path(lab.newest().directory)
    (directory / "exit.json").unlink()
    body = json.loads((directory / "run.json").read_text())
    kernel = body["boot"].partition("/")[0]
    (directory / "run.json").write_text(json.dumps({**body, "boot": f"{kernel}/1"}))
    assert lab.newest().detail == "container restarted under the run"
    assert diagnosed(lab)["incident"] == "container-restarted"
    (directory / "run.json").write_text(json.dumps({**body, "boot": "another/1"}))
    assert lab.newest().detail == "container or host restarted under the run"


def test_a_target_that_cannot_be_asked_is_diagnosed_too(lab: Lab) -> None:
    text = lab.hosts_file.read_text()
    lab.hosts_file.write_text(text.replace("    via: local\n", "    via: local\n    python: /nonexistent/python\n"))
    body = diagnosed(lab)
    assert body["incident"] == "agent-failed"
    assert body["proof"][0]["source"] == "failure"


def test_a_wrong_run_is_a_usage_error(lab: Lab) -> None:
    done = lab.fab("diagnose", "--run", "nonsense")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_evidence_is_saved_without_secrets_and_replayed(lab: Lab, tmp_path: Path) -> None:
    lab.deploy()
    lab.start("standin.steps=1")
    lab.wait_for("finished")
    with Path(lab.newest().log).open("a") as log:
        log.write("HF_TOKEN=Zq9vK3bW7xT1mN5pL8cR\nOSError: [Errno 28] No space left on device\n")
    (Path(lab.newest().directory) / "exit.json").write_text(
        json.dumps({"code": 1, "signal": None, "ended_at": 1.0, "boot": "x"})
    )
    saved = tmp_path / "case.txt"
    body = diagnosed(lab, "--save", str(saved))
    assert body["incident"] == "disk-full"
    assert "Zq9vK3bW7xT1mN5pL8cR" not in saved.read_text()
    assert saved.stat().st_mode & 0o777 == 0o600
    again = diagnosed(lab, "--evidence", str(saved))
    assert again["incident"] == "disk-full"
    assert again["proof"] == body["proof"]
    assert lab.fab("diagnose", "--evidence", str(lab.home / "missing")).returncode == 2


def test_a_long_log_is_numbered_from_its_beginning(tmp_path: Path) -> None:
    lines = [f"line {number} {'x' * 90}" for number in range(1, 20_001)]
    (tmp_path / "train.log").write_text("\n".join(lines) + "\n")
    found = [e for e in evidence.of_run(tmp_path) if e.source == Source.LOG]
    assert len(found) == 2
    assert found[0].text.startswith("line 1 ")
    for excerpt in found:
        for offset, text in enumerate(excerpt.text.splitlines()):
            assert text.startswith(f"line {excerpt.first_line + offset} ")
    assert found[1].text.rstrip().endswith(lines[-1])


def test_files_that_are_not_there_are_no_evidence(tmp_path: Path) -> None:
    assert evidence.of_run(tmp_path) == []
    (tmp_path / "train.log").write_bytes(os.urandom(4096))
    assert [e.source for e in evidence.of_run(tmp_path)] == [Source.LOG]


def test_only_this_run_s_oom_kills_are_evidence() -> None:
    """The kernel's log is the whole machine's; another guest that ran out of memory says nothing about this run."""
    line = "[1204332.1] Memory cgroup out of memory: Killed process 91044 (python) total-vm:412330112kB"
    constraint = "[1204332.0] oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/lxc/200/ns,task=python,pid=91044,uid=0"
    for text in (line, constraint):
        assert evidence._concerns(text, {91044}, None)
        assert evidence._concerns(text, set(), 1)
        assert not evidence._concerns(text, {77}, 0)
        assert not evidence._concerns(text, set(), None)
    assert evidence._concerns("NVRM: Xid (PCI:0000:5d:00): 79, GPU has fallen off the bus", set(), None)
    assert not evidence._concerns("lxcbr0: port 1(veth) entered disabled state", {1}, 1)
