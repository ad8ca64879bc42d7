"""Launcher `systemd`, for real: a container whose init is systemd, and runs that are its units.

Shown able to fail: with KillMode=none the stopped unit's run goes on; without --collect the killed unit stays loaded.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_ops.agent.runs import RunStatus
from tests.sandbox.box import Box, Container
from tests.sandbox.laptop import Laptop
from tests.waiting import wait_until

SYSTEMD = Path("/lib/systemd/systemd")
LONG = ("--set", "standin.steps=1000000")

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(not SYSTEMD.exists() or shutil.which("systemd-run") is None, reason="systemd is not installed"),
]


@pytest.fixture(scope="module")
def container(shared_box: Box) -> Iterator[Container]:
    """Container 201, booted by systemd as far as it takes to run units."""
    made = shared_box.add_container(201, init=f"{SYSTEMD} --unit=basic.target")
    try:
        made.start()
        wait_until(lambda: unit_state(made, "basic.target") == "active", "systemd has booted")
        yield made
    finally:
        made.remove()
        del shared_box.containers[201]


@pytest.fixture
def laptop(box: Box, container: Container, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Laptop]:
    made = Laptop(tmp_path, box, f"u{zlib.crc32(request.node.nodeid.encode()):08x}")
    made.standin_trainer()
    made.write_hosts(vmid=201, launcher="systemd")
    yield made
    container.run("systemctl", "kill", "--signal=KILL", "dflash-*", check=False)
    made.end_everything()


def unit_state(container: Container, unit: str) -> str:
    return container.run("systemctl", "is-active", unit, check=False).strip()


def launched(laptop: Laptop, *words: str) -> RunStatus:
    done = laptop.fab("deploy", "launch", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return reached(laptop, "training")


def reached(laptop: Laptop, *states: str) -> RunStatus:
    remote = laptop.remote()
    wait_until(lambda: laptop.status(remote).state in states, f"state {states}")
    return laptop.status(remote)


def test_launch_status_stop(laptop: Laptop, container: Container) -> None:
    run = launched(laptop, *LONG)
    assert (run.launcher, run.session) == ("systemd", f"dflash-{run.run_id}")
    assert unit_state(container, run.session) == "active"
    assert laptop.fab("status").returncode == 0
    refused = laptop.fab("launch")
    assert refused.returncode == 21
    assert run.run_id in refused.stderr
    attach = laptop.fab("attach")
    assert attach.returncode == 2
    done = laptop.fab("stop")
    assert done.returncode == 0, done.stderr
    assert "checkpoint written" in done.stdout
    assert laptop.fab("tail-log").returncode == 0
    wait_until(lambda: unit_state(container, run.session) == "inactive", "the unit is gone")
    assert run.session not in container.run("systemctl", "list-units", "--all", "dflash-*")
    assert laptop.fab("launch").returncode == 0


def test_systemctl_stop_is_a_stop_with_a_checkpoint(laptop: Laptop, container: Container) -> None:
    run = launched(laptop, *LONG)
    container.run("systemctl", "stop", run.session)
    ended = reached(laptop, "finished", "failed", "killed", "lost")
    assert (ended.state, ended.detail) == ("finished", "stopped on request")
    assert ended.latest.checkpoint is not None


def test_a_deaf_run_is_ended_by_kill_only(laptop: Laptop, container: Container) -> None:
    run = launched(laptop, *LONG, "--set", "standin.mode=deaf")
    assert laptop.fab("stop", "--wait", "1").returncode == 124
    assert unit_state(container, run.session) == "active"
    assert laptop.fab("stop", "--wait", "1", "--kill").returncode == 0
    assert reached(laptop, "killed", "lost").state == "killed"
    wait_until(lambda: unit_state(container, run.session) != "active", "the unit is gone")


def test_a_killed_unit_is_lost_and_leaves_nothing_behind(laptop: Laptop, container: Container) -> None:
    run = launched(laptop, *LONG, "--set", "standin.mode=deaf")
    container.run("systemctl", "kill", "--signal=KILL", "--kill-who=all", run.session)
    assert reached(laptop, "lost", "killed").state == "lost"
    assert laptop.fab("status").returncode == 31
    assert container.pids("trainer", run.run_id) == []
    wait_until(
        lambda: run.session not in container.run("systemctl", "list-units", "--all", "dflash-*"), "it is collected"
    )
    assert laptop.fab("launch").returncode == 0


def test_the_shutdown_of_the_container_is_a_stop_with_a_checkpoint(laptop: Laptop, container: Container) -> None:
    run = launched(laptop, *LONG)
    container.lxc("lxc-stop", "-t", "150")
    container.start()
    wait_until(lambda: unit_state(container, "basic.target") == "active", "systemd has booted")
    ended = laptop.status(laptop.remote())
    assert (ended.run_id, ended.state, ended.detail) == (run.run_id, "finished", "stopped on request")
    assert ended.latest.checkpoint is not None
