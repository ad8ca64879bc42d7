"""Drills with a real sshd, a real container and the stand-in pct: faults of host, container and route.

Shown able to fail: a gate that refuses for another reason than the card ends the gpu-busy page with another code than
it says.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.drill import SHELL, Places, Run, play, shell, tools
from tests.fixtures import fake_nvidia_smi
from tests.sandbox.box import Box
from tests.sandbox.laptop import Laptop
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.sandbox


def inside(box: Box) -> Run:
    """Run a block in the container, as `pct enter` would."""

    def run(script: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        words = [f"{name}={value}" for name, value in variables.items()]
        path = "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        return box.container.lxc(
            "lxc-attach", "--clear-env", "--", "/usr/bin/env", path, "HOME=/root", *words, *SHELL, script, check=False
        )

    return run


def places(laptop: Laptop) -> Places:
    here = shell(tools(laptop.home / "tools"), laptop.checkout, laptop.environment)
    host = shell(f"{laptop.box.pct.parent}:{laptop.box.home}/bin", laptop.home, {"HOME": "/root"})
    return Places(here, host, inside(laptop.box))


def variables(laptop: Laptop, run: str = "") -> dict[str, str]:
    return {
        "NAME": "ct200",
        "VMID": "200",
        "HOST": laptop.box.sshd.address,
        "ROOT": laptop.root,
        "WORKSPACE": laptop.root,
        "PYTHON": sys.executable,
        "FINGERPRINT": laptop.box.sshd.fingerprint(),
        "RUN": run,
    }


def training(laptop: Laptop) -> str:
    """A run that trains; its id."""
    done = laptop.fab("deploy", "launch", "--variant", "threadwarm", "--set", "standin.steps=1000000")
    assert done.returncode == 0, done.stdout + done.stderr
    remote = laptop.remote()
    wait_until(lambda: laptop.status(remote).state == "training", "the run trains")
    run = laptop.status(remote).run_id
    remote.transport.close()
    return run


def test_container_stopped_then_restarted_under_a_run(laptop: Laptop) -> None:
    """Two pages in a row, as an operator would meet them: the container is down, then up, and the run is lost."""
    run = training(laptop)
    saved = laptop.layout.run(run) / "checkpoints" / "step-00000001"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text("{}")
    laptop.box.container.stop()
    play("container-stopped", places(laptop), variables(laptop, run))
    assert laptop.box.container.running()
    remote = laptop.remote()
    wait_until(lambda: laptop.status(remote).state == "lost", "lost")
    assert laptop.status(remote).detail == "container or host restarted under the run"
    found = json.loads(laptop.fab("diagnose", "--json").stdout)
    assert (found["incident"], found["run"]) == ("container-restarted", run)
    steps = play("container-restarted", places(laptop), variables(laptop, run))
    assert any("step-00000001" in step.said for step in steps), "it goes on from what was saved"


def test_host_unreachable(laptop: Laptop) -> None:
    laptop.box.sshd.stop()
    play("host-unreachable", places(laptop), variables(laptop), ("How to confirm",))
    found = json.loads(laptop.fab("diagnose", "--json").stdout)
    assert found["incident"] == "host-unreachable"
    laptop.box.sshd.start()
    play("host-unreachable", places(laptop), variables(laptop), ("Fix", "Verify"))


def test_host_key_changed(laptop: Laptop) -> None:
    laptop.box.sshd.stop()
    laptop.box.sshd.new_host_key()
    laptop.box.sshd.start()
    found = json.loads(laptop.fab("diagnose", "--json").stdout)
    assert found["incident"] == "host-key"
    play("host-key", places(laptop), variables(laptop))


def test_add_a_host(laptop: Laptop) -> None:
    laptop.known_hosts.write_text("")
    play("add-a-host", places(laptop), variables(laptop))


def test_gpu_busy(laptop: Laptop) -> None:
    """The card is busy as the host sees it; the container shows nothing."""
    program = fake_nvidia_smi.install(laptop.box.home / "bin", fake_nvidia_smi.BUSY)
    try:
        slow = {"target.allow_slow_kernels": True}  # so that the card is the only reason to refuse
        laptop.write_hosts(gpus={"count": 1}, idle={"samples": 1}, train=slow)
        laptop.fab("deploy")
        steps = play("gpu-busy", places(laptop), variables(laptop), ("How to confirm",))
        assert any("4614" in step.said for step in steps)
    finally:
        program.unlink()
    laptop.write_hosts()
    play("gpu-busy", places(laptop), variables(laptop), ("Fix", "Verify"))


def test_a_supervisor_killed_in_the_container(laptop: Laptop) -> None:
    """The state is right, and the resume goes on from what the trainer saved when the kernel told it."""
    run = training(laptop)
    for pid in laptop.box.container.pids("supervise", run):
        laptop.box.container.run("/bin/kill", "-9", str(pid))
    remote = laptop.remote()
    wait_until(lambda: laptop.status(remote).state == "lost", "lost")
    wait_until(lambda: list((laptop.layout.run(run) / "checkpoints").glob("step-*")), "the trainer has saved")
    play("run-lost", places(laptop), variables(laptop, run))


def test_a_killed_tmux_server(laptop: Laptop) -> None:
    """The server's end hangs up on the supervisor, who stops the run in order: nothing is lost."""
    laptop.write_hosts(launcher="tmux")
    run = training(laptop)
    socket = f"{laptop.root}/tmux.sock"
    laptop.box.container.run("/usr/bin/tmux", "-S", socket, "kill-server")
    remote = laptop.remote()
    wait_until(lambda: not laptop.status(remote).live, "ended")
    assert laptop.status(remote).state in ("finished", "lost")
    wait_until(lambda: list((laptop.layout.run(run) / "checkpoints").glob("step-*")), "the trainer has saved")
    assert laptop.fab("launch", "--resume", run).returncode == 0


def test_doctor_sees_both_sides(laptop: Laptop) -> None:
    done = laptop.fab("doctor", "--quick", "--json")
    body = json.loads(done.stdout)
    assert {line["place"] for line in body["lines"]} == {"laptop", "host", "container", "both"}
    assert done.returncode == 0, [line for line in body["lines"] if line["verdict"] == "bad"]


def test_a_run_is_pulled_through_the_route(laptop: Laptop, tmp_path: Path) -> None:
    laptop.fab("deploy", "launch", "--variant", "threadwarm")
    remote = laptop.remote()
    wait_until(lambda: laptop.status(remote).state == "finished", "finished")
    big = laptop.layout.run(laptop.status(remote).run_id) / "checkpoints" / "step-00000003" / "model.safetensors"
    big.write_bytes(bytes(range(256)) * 20_000)
    done = laptop.fab("pull", "--to", str(tmp_path / "here"))
    assert done.returncode == 0, done.stderr
    (copied,) = (tmp_path / "here").rglob("model.safetensors")
    assert copied.read_bytes() == big.read_bytes()


def test_tensorboard_through_the_route(laptop: Laptop) -> None:
    # This container's init is no init: nobody has brought its loopback up.
    laptop.box.container.run("/bin/sh", "-c", "ip link set lo up")
    assert laptop.fab("deploy").returncode == 0
    shown = laptop.start_fab("tensorboard", "--port", "0")
    assert shown.stdout is not None
    line = shown.stdout.readline().decode()
    match = re.search(r"http://127\.0\.0\.1:\d+/", line)
    assert match is not None, line
    address = match[0] + "data/logdir"
    with ThreadPoolExecutor(6) as pool:  # more at a time than are let through
        answers = list(pool.map(lambda _: urllib.request.urlopen(address, timeout=PATIENCE_S).read(), range(6)))
    assert {json.loads(answer)["logdir"] for answer in answers} == {f"{laptop.root}/runs"}
    shown.send_signal(signal.SIGINT)
    shown.communicate(timeout=PATIENCE_S)
    wait_until(lambda: not laptop.box.container.pids("tensorboard.main"), "TensorBoard has ended")
