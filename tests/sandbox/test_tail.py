"""tail-log over a route that breaks: every byte of the log once, whatever happens to the connection.

Shown able to fail: with the offset not carried over a reconnect, with the whole answer kept in memory, and with the
follower deaf to the loss of its client, the tests of these went red.
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from dflash_ops import launch, release
from dflash_ops.agent.stop import StopRequest, StopResult
from dflash_ops.remote import Remote
from tests.sandbox.box import send
from tests.sandbox.laptop import Laptop
from tests.sandbox.test_upload_cuts import quiet
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.sandbox


def start_run(laptop: Laptop, *settings: str) -> tuple[Remote, Path]:
    """A run of the stand-in, and its log as this machine sees it."""
    remote = laptop.remote()
    release.deploy(remote, release.collect(laptop.checkout), "test", lambda _text: None, quiet)
    options = launch.LaunchOptions(variant="sdpa", settings=settings)
    done = launch.launch(remote, laptop.target, options, "test", lambda _text: None)
    return remote, Path(f"{laptop.box.container.rootfs}{done.log}")


def end_run(remote: Remote) -> None:
    remote.call("stop", StopRequest(who="test", kill=True, wait_s=60.0), StopResult, deadline=PATIENCE_S)


def test_twenty_server_kills_lose_nothing_and_double_nothing(laptop: Laptop) -> None:
    remote, log = start_run(laptop, "standin.steps=1000000", "standin.interval=0.01")
    remote.transport.close()
    got = bytearray()
    with (laptop.home / "remarks").open("wb") as remarks:
        follower = laptop.start_fab("tail-log", "--lines", "all", "--raw", stderr=remarks)
    reader = threading.Thread(target=_drain, args=(follower, got), daemon=True)
    reader.start()
    wait_until(lambda: got, "the log comes")
    for number in range(1, 21):
        for pid in laptop.box.sshd.sessions():
            send(pid, signal.SIGKILL)
        wait_until(lambda number=number: _losses(laptop) == number, "the follower notices")
        so_far = log.stat().st_size  # what is written from now on can only come over another connection
        wait_until(lambda so_far=so_far: len(got) > so_far, "the log goes on")
    end_run(laptop.remote())
    assert follower.wait(PATIENCE_S) == 0
    reader.join(PATIENCE_S)
    assert hashlib.sha256(got).hexdigest() == hashlib.sha256(log.read_bytes()).hexdigest()
    assert _losses(laptop) == 20


def _losses(laptop: Laptop) -> int:
    return (laptop.home / "remarks").read_text().count("connection lost")


def _drain(process: subprocess.Popen[bytes], into: bytearray) -> None:
    assert process.stdout is not None
    while piece := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]  # a buffered reader
        into.extend(piece)


def test_a_backlog_of_300_mb_stays_out_of_memory(laptop: Laptop) -> None:
    remote, log = start_run(laptop, "standin.steps=1")
    wait_until(lambda: not laptop.status(remote).live, "the run ends")
    line = bytes(range(32, 127)) * 10 + b"\n"
    with log.open("ab") as file:
        block = line * 1000
        for _ in range(300_000_000 // len(block)):
            file.write(block)
    with (laptop.home / "remarks").open("wb") as remarks:
        process = subprocess.Popen(
            laptop.command("tail-log", "--no-follow", "--lines", "all", "--raw"),
            cwd=laptop.checkout,
            env=laptop.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=remarks,
        )
    laptop.started.append(process)
    assert process.stdout is not None
    digest, peak = hashlib.sha256(), 0
    while piece := process.stdout.read(1 << 20):
        digest.update(piece)
        peak = max(peak, _peak_kib(process.pid))
    assert process.wait(PATIENCE_S) == 0
    with log.open("rb") as file:
        assert digest.hexdigest() == hashlib.file_digest(file, "sha256").hexdigest()
    assert 0 < peak < 150 << 10


def _peak_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


class TestLeaving:
    def test_ctrl_c_leaves_the_run_alone_and_nothing_behind(self, laptop: Laptop) -> None:
        remote, _ = start_run(laptop, "standin.steps=1000000", "standin.interval=0.1")
        follower = laptop.start_fab("tail-log", stderr=subprocess.STDOUT)
        wait_until(lambda: laptop.box.container.pids("follow"), "the follower runs")
        follower.send_signal(signal.SIGINT)
        assert follower.wait(PATIENCE_S) == 130
        assert follower.stdout is not None
        assert b"goes on untouched" in follower.stdout.read()
        wait_until(lambda: not laptop.box.container.pids("follow"), "nothing is left in the container")
        assert laptop.status(remote).live

    def test_a_killed_client_leaves_no_follower_of_a_silent_log(self, laptop: Laptop) -> None:
        start_run(laptop, "standin.steps=2", "standin.interval=300")
        follower = laptop.start_fab("tail-log")
        wait_until(lambda: laptop.box.container.pids("follow"), "the follower runs")
        follower.kill()
        wait_until(lambda: not laptop.box.container.pids("follow"), "nothing is left in the container")

    def test_a_reader_that_has_enough(self, laptop: Laptop) -> None:
        start_run(laptop, "standin.steps=1000000", "standin.interval=0.01")
        follower = laptop.start_fab("tail-log", "--lines", "all")
        assert follower.stdout is not None
        assert follower.stdout.readline()
        follower.stdout.close()
        assert follower.wait(PATIENCE_S) == 0
