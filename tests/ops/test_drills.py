"""Drills on this machine as a target: each page's commands are executed with its fault there.

A fault of the trainer or of the hardware is put in as recorded evidence: the log, the metrics and the exit record of a
crashed run become those of tests/fixtures/logs. Faults of host, container and route: tests/sandbox/test_drills.py.

Shown able to fail: with the `exit=` of a failed run's tail-log taken away, and with a trainer that cannot export, the
pages that rely on them fail.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest

from dflash_ops.agent import process, runs
from dflash_ops.incidents import Evidence, Source
from tests.drill import Places, Step, play, shell, tools
from tests.ops.conftest import Lab
from tests.runbook import fences, pages
from tests.waiting import wait_until

LOGS = Path(__file__).parents[1] / "fixtures" / "logs" / "incidents"
REPLAYED = {
    "compile-race": "compile-race",
    "dense-attention": "dense-attention",
    "recompile-limit": "recompile-limit.stance",
    "graph-capture": "graph-capture",
    "corrupt-compile-cache": "corrupt-compile-cache",
    "cuda-oom": "cuda-oom",
    "host-oom": "host-oom",
    "nan-loss": "nan-loss.diverged",
    "no-valid-anchors": "no-valid-anchors.trainer",
    "data-refused": "data-refused",
    "cuda-fault": "cuda-fault",
    "missing-fast-kernels": "missing-fast-kernels",
    "graph-tree-thread": "graph-tree-thread",
}
"""Page -> the recorded case that its drill plays."""
NEEDS_THE_CARD = {
    "driver-mismatch": "driver-mismatch",
    "uvm-missing": "uvm-missing",
    "gpu-lost": "gpu-lost",
    "memory-throttled": "memory-throttled",
}
"""Pages whose fix needs hardware: the evidence is replayed up to the diagnosis."""
HERE = {
    "checkpoint-corrupt", "disk-full", "environment-unfit", "run-lost", "lock-held", "tmux-socket-lost",
    "stale-partial-release", "first-set-up", "launch", "stop-and-resume", "roll-back", "change-variant",
    "move-checkpoints", "replace-a-gpu", "upgrade-torch", "agent-failed",
}  # fmt: skip
IN_THE_SANDBOX = {"container-stopped", "container-restarted", "host-unreachable", "host-key", "gpu-busy", "add-a-host"}


def test_every_page_has_a_drill() -> None:
    drilled = [*REPLAYED, *NEEDS_THE_CARD, *HERE, *IN_THE_SANDBOX]
    assert len(drilled) == len(set(drilled))
    assert set(drilled) == {path.stem for path in pages()}


class Drill:
    """One lab with a page's variables set."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        laptop = shell(tools(lab.home / "tools"), lab.checkout, lab.environment)
        here = shell("/usr/local/bin", lab.home, {"HOME": str(lab.home)})
        self.places = Places(laptop, here, here)
        self.variables = {"NAME": "local", "VMID": "200", "ROOT": str(lab.root), "WORKSPACE": str(lab.root)}
        self.variables |= {"PYTHON": sys.executable, "RUN": ""}

    def crashed(self) -> str:
        """A run that has saved once and then crashed; its id is RUN."""
        self.lab.deploy()
        self.lab.start("standin.mode=stumble")
        status = self.lab.wait_for("failed")
        self.variables["RUN"] = status.run_id
        return status.run_id

    def put_in(self, case: str) -> None:
        """Make the crashed run's files say what was recorded."""
        evidence = Evidence.from_bundle((LOGS / f"{case}.txt").read_text())
        directory = Path(self.lab.newest().directory)
        with (directory / "train.log").open("a") as log:
            log.write(evidence.text(Source.LOG) + "\n")
        with (directory / "metrics.jsonl").open("a") as metrics:
            metrics.write("\n" + evidence.text(Source.METRICS) + "\n")
        recorded = json.loads(evidence.text(Source.EXIT) or "{}")
        body = json.loads((directory / "exit.json").read_text())
        for key in ("code", "signal", "oom_kills"):
            if key in recorded:
                body[key] = recorded[key]
        (directory / "exit.json").write_text(json.dumps(body))

    def play(self, page: str) -> list[Step]:
        return play(page, self.places, self.variables)


@pytest.fixture
def drill(lab: Lab) -> Drill:
    return Drill(lab)


def text(steps: list[Step], words: str) -> str:
    """What the blocks that hold `words` said."""
    return "\n".join(step.said for step in steps if words in step.fence.script)


@pytest.mark.parametrize("page", REPLAYED)
def test_replayed(drill: Drill, page: str) -> None:
    drill.crashed()
    drill.put_in(REPLAYED[page])
    steps = drill.play(page)
    if any("diagnose" in step.fence.script for step in steps):
        assert f"runbooks/{page}.md" in text(steps, "diagnose")
    drill.lab.wait_for("finished", "training", "starting", "failed", "killed")


@pytest.mark.parametrize("page", NEEDS_THE_CARD)
def test_replayed_up_to_the_hardware(lab: Lab, page: str) -> None:
    done = lab.fab("diagnose", "--evidence", str(LOGS / f"{NEEDS_THE_CARD[page]}.txt"))
    assert f"runbooks/{page}.md" in done.stdout
    hardware = [fence for fence in fences(pages()[0].parent / f"{page}.md") if not fence.runs]
    assert hardware, "a page that needs no hardware has to be drilled whole"
    if page == "memory-throttled":
        Drill(lab).play(page)


def test_checkpoint_corrupt(drill: Drill) -> None:
    run = drill.crashed()
    base = drill.lab.layout.run(run) / "checkpoints"
    shutil.copytree(base / "step-00000001", base / "step-00000009")
    drill.put_in("checkpoint-corrupt.trainer")
    steps = drill.play("checkpoint-corrupt")
    assert "runbooks/checkpoint-corrupt.md" in text(steps, "diagnose")
    assert (base / "damaged-step-00000009").is_dir()
    assert "step-00000001" in text(steps, "launch --resume")


def test_disk_full(drill: Drill) -> None:
    """The file system is small and filled; what `prune` may take makes room again."""
    run = drill.crashed()
    drill.variables["RUN"] = run
    base = drill.lab.layout.run(run) / "checkpoints"
    for step in range(2, 6):
        folder = base / f"step-{step:08d}"
        folder.mkdir()
        (folder / "state.json").write_text(json.dumps({"files": {}}))
        (folder / "model.safetensors").write_bytes(b"x" * 100_000)
    hosts = drill.lab.hosts_file.read_text()
    drill.lab.hosts_file.write_text(hosts.replace("min_free_gib: 0", "min_free_gib: 999999"))
    steps = play("disk-full", drill.places, drill.variables, ("How to confirm",))
    assert "runbooks/disk-full.md" in text(steps, "doctor")
    drill.lab.hosts_file.write_text(hosts)
    steps = play("disk-full", drill.places, drill.variables, ("Fix",))
    assert "removed 3" in text(steps, "--yes")
    assert sorted(path.name for path in base.iterdir())[-2:] == ["step-00000004", "step-00000005"]
    drill.lab.start()
    drill.lab.wait_for("finished")
    play("disk-full", drill.places, drill.variables, ("Verify",))


def test_environment_unfit(drill: Drill) -> None:
    hosts = drill.lab.hosts_file.read_text()
    drill.lab.hosts_file.write_text(hosts + "    gpus: {count: 8}\n")
    steps = drill.play("environment-unfit")
    assert "bad" in text(steps, "doctor")


def test_agent_failed(drill: Drill) -> None:
    hosts = drill.lab.hosts_file.read_text()
    drill.lab.root.mkdir(exist_ok=True)
    drill.lab.hosts_file.write_text(
        hosts.replace("    via: local\n", "    via: local\n    python: /nonexistent/python\n")
    )
    play("agent-failed", drill.places, drill.variables, ("How to confirm",))
    drill.lab.hosts_file.write_text(hosts)
    play("agent-failed", drill.places, drill.variables, ("Fix", "Verify"))


def test_run_lost(drill: Drill) -> None:
    drill.lab.deploy()
    status = drill.lab.launch("standin.steps=1000000")
    drill.variables["RUN"] = status.run_id
    record = runs.read_run(Path(status.directory))
    assert record is not None
    assert record.supervisor is not None
    process.send(record.supervisor, signal.SIGKILL)
    wait_until(lambda: drill.lab.newest().state == "lost", "lost")
    wait_until(lambda: (Path(status.directory) / "checkpoints").is_dir(), "the trainer has saved")
    steps = drill.play("run-lost")
    assert "runbooks/run-lost.md" in text(steps, "diagnose")


def test_lock_held(drill: Drill) -> None:
    drill.lab.deploy()
    drill.lab.launch("standin.steps=1000000")
    steps = drill.play("lock-held")
    assert "lock" in steps[0].said


def test_tmux_socket_lost(drill: Drill) -> None:
    drill.lab.write_hosts("tmux")
    drill.lab.deploy()
    drill.lab.launch("standin.steps=1000000")
    drill.lab.layout.tmux_socket.unlink()
    # The run goes on, and its state says so: tmux only shows it.
    wait_until(lambda: drill.lab.status()["run"]["state"] == "training", "training without its socket")
    found = json.loads(drill.lab.fab("diagnose", "--json").stdout)
    assert found["incident"] == "tmux-socket-lost"
    steps = drill.play("tmux-socket-lost")
    assert "dflash" in text(steps, "list-sessions")
    assert drill.lab.newest().state == "training"


def test_stale_partial_release(drill: Drill) -> None:
    drill.lab.deploy()
    before = drill.lab.layout.current.readlink()
    (drill.lab.layout.releases / "0123456789abcdef.partial").mkdir()
    (drill.lab.checkout / "trainer" / "new.py").write_text("")
    drill.play("stale-partial-release")
    assert drill.lab.layout.current.readlink() != before


def test_first_set_up(drill: Drill) -> None:
    steps = drill.play("first-set-up")
    assert "finished" in text(steps, "status")


def test_launch(drill: Drill) -> None:
    drill.play("launch")
    drill.lab.wait_for("finished")


def test_stop_and_resume(drill: Drill) -> None:
    drill.lab.deploy()
    drill.variables["RUN"] = drill.lab.launch("standin.steps=1000000").run_id
    steps = drill.play("stop-and-resume")
    assert "goes on from" in text(steps, "--resume")


def test_roll_back(drill: Drill) -> None:
    drill.lab.deploy()
    first = drill.lab.layout.current.readlink()
    (drill.lab.checkout / "trainer" / "new.py").write_text("")
    drill.lab.deploy()
    drill.lab.launch("standin.steps=1000000")
    drill.play("roll-back")
    assert drill.lab.layout.current.readlink() == first


def test_change_variant(drill: Drill) -> None:
    drill.lab.deploy()
    drill.variables["RUN"] = drill.lab.launch("standin.steps=1000000").run_id
    drill.play("change-variant")
    assert drill.lab.newest().variant == "sdpa"


def test_move_checkpoints(drill: Drill, tmp_path: Path) -> None:
    run = drill.crashed()
    drill.variables["WHERE"] = str(tmp_path)
    steps = drill.play("move-checkpoints")
    assert "0 bytes moved" in steps[-1].said
    assert (tmp_path / run / "pull.json").is_file()


@pytest.mark.parametrize("page", ["replace-a-gpu", "upgrade-torch"])
def test_pages_that_are_mostly_hardware(drill: Drill, page: str) -> None:
    drill.lab.deploy()
    drill.lab.launch("standin.steps=1000000")
    drill.play(page)
