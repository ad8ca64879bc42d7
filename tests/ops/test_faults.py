"""A full disk and an OOM kill, for real: the state comes right and nothing that was saved is lost.

Needs root: a small file system is mounted, a memory cgroup is made. Shown able to fail: without the supervisor's
reserve its record waits until the disk has room again.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_ops.agent import runs
from tests.ops.conftest import Lab
from tests.waiting import wait_until

CGROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def save(lab: Lab, step: int) -> Path:
    """A checkpoint as a trainer would have written it before the fault."""
    directory = Path(lab.newest().directory) / "checkpoints" / f"step-{step:08d}"
    directory.mkdir(parents=True)
    (directory / "state.json").write_text(json.dumps({"step": step}))
    return directory


@pytest.fixture
def small_disk(lab: Lab) -> Iterator[Path]:
    """The workspace on a file system of 8 MiB."""
    workspace = lab.root.parent / "workspace"
    workspace.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(workspace)], check=True)
    lab.hosts_file.write_text(lab.hosts_file.read_text() + f"    workspace: {workspace}\n")
    try:
        yield workspace
    finally:
        for path in runs.directories(lab.layout.__class__(lab.root, workspace)):
            record = runs.read_run(path)
            for identity in (record.supervisor, record.trainer) if record else ():
                if identity is not None:
                    with contextlib.suppress(OSError):
                        os.kill(identity.pid, 9)
        subprocess.run(["umount", "-l", str(workspace)], check=False)


def test_a_full_disk(lab: Lab, small_disk: Path) -> None:
    assert lab.fab("deploy", "launch", "--set", "standin.steps=1000000").returncode == 0
    run = wait_until(lambda: lab.status()["run"], "the run")
    wait_until(lambda: lab.status()["run"]["state"] == "training", "training")
    directory = Path(run["directory"])
    saved = directory / "checkpoints" / "step-00000001"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text("{}")
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)

    def named() -> bool:
        body = json.loads(lab.fab("diagnose", "--json").stdout)
        return bool(body["incident"] == "disk-full" and body["state"] != "training")

    wait_until(named, "the full disk has its name")
    # The disk is still full: the supervisor writes its record into room that it has reserved.
    wait_until(lambda: lab.status()["run"]["state"] == "failed", "failed")
    filler.unlink()
    assert (saved / "state.json").read_text() == "{}"
    done = lab.fab("launch", "--resume", run["run_id"])
    assert done.returncode == 0, done.stderr
    assert "step-00000001" in done.stdout


def test_a_full_root(lab: Lab) -> None:
    """Shown able to fail: the note beside the lock could not be written, which made both commands look like bugs."""
    lab.root.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(lab.root)], check=True)
    try:
        lab.deploy()
        cached = lab.layout.cache / lab.layout.current.readlink().name
        cached.mkdir()
        with contextlib.suppress(OSError), (cached / "kernel").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        done = lab.fab("launch", "--keep-cache")
        assert (done.returncode, "the disk is full" in done.stderr) == (24, True)
        done = lab.fab("clear-cache")
        assert (done.returncode, "cleared" in done.stdout) == (0, True)
        assert lab.fab("launch").returncode == 0
    finally:
        lab.end_everything()
        subprocess.run(["umount", "-l", str(lab.root)], check=False)


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of 200 MB."""
    base = next((path for path in CGROUPS if (path / "cgroup.procs").exists()), None)
    if base is None:
        pytest.skip("no memory cgroup here")
    made = base / f"dflash-test-{os.getpid()}"
    try:
        made.mkdir()
        limit = made / ("memory.max" if (base / "cgroup.controllers").exists() else "memory.limit_in_bytes")
        limit.write_text(str(200 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield made
    finally:
        wait_until(lambda: not (made / "cgroup.procs").read_text().strip(), "the cgroup is empty")
        made.rmdir()


def test_an_oom_kill_is_named_and_not_tried_again(lab: Lab, cgroup: Path) -> None:
    lab.deploy()
    lab.start("standin.mode=hungry", "standin.steps=1000000", keep_alive=3)
    status = lab.wait_for("training")
    saved = save(lab, 7)
    record = runs.read_run(Path(status.directory))
    assert record is not None
    assert record.supervisor is not None
    assert record.trainer is not None
    for identity in (record.trainer, record.supervisor):
        (cgroup / "cgroup.procs").write_text(str(identity.pid))
    (Path(status.directory) / "eat").touch()
    wait_until(lambda: lab.newest().state == "killed", "killed")
    assert "for memory" in lab.newest().detail
    assert lab.newest().attempt == 1
    assert "host-oom would only repeat" in Path(status.log).read_text()
    body = json.loads(lab.fab("diagnose", "--json").stdout)
    assert (body["incident"], body["retryable"]) == ("host-oom", False)
    assert saved.is_dir()
    done = lab.fab("launch", "--resume", status.run_id)
    assert "step-00000007" in done.stdout, done.stderr
