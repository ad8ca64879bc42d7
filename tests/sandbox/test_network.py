"""The route over a wire with delay and loss: real packets, late and missing.

Shown able to fail: with a wire that swallows everything, the first test went red.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox.box import Box, Sshd
from tests.sandbox.laptop import Laptop
from tests.sandbox.network import Network, missing, network
from tests.sandbox.test_tail import end_run, start_run
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.sandbox


@pytest.fixture
def far(box: Box, tmp_path: Path) -> Iterator[tuple[Laptop, Network]]:
    """A laptop at the other end of a wire, and the wire."""
    reason = missing()
    if reason:
        if os.environ.get("CI") == "true":
            pytest.fail(f"the network sandbox must run in CI, but: {reason}")
        pytest.skip(f"network sandbox: {reason}")
    with network() as net:
        sshd = Sshd(tmp_path / "ssh", address=net.host_address)
        sshd.create()
        sshd.start()
        laptop = Laptop(tmp_path, dataclasses.replace(box, sshd=sshd), "far", place=net.laptop)
        laptop.standin_trainer()
        try:
            yield laptop, net
        finally:
            laptop.end_everything()
            sshd.stop()


def test_delay_and_loss(far: tuple[Laptop, Network]) -> None:
    laptop, net = far
    net.wire.delay_s, net.wire.loss = 0.03, 0.02
    words = ("deploy", "launch", "--variant", "sdpa", "--set", "standin.steps=50")
    done = laptop.fab(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    followed = laptop.fab("tail-log", "--lines", "all", "--raw")
    assert followed.returncode == 0, followed.stderr
    (log,) = laptop.layout.runs.glob("*/train.log")
    assert hashlib.sha256(followed.stdout.encode()).digest() == hashlib.sha256(log.read_bytes()).digest()
    assert net.wire.lost > 0


def test_a_wire_that_goes_dead_for_a_while(far: tuple[Laptop, Network]) -> None:
    laptop, net = far
    remote, log = start_run(laptop, "standin.steps=1000000", "standin.interval=0.02")
    remote.transport.close()
    got = bytearray()
    with (laptop.home / "remarks").open("wb") as remarks:
        follower = laptop.start_fab("tail-log", "--lines", "all", "--raw", stderr=remarks)

    def drain() -> None:
        assert follower.stdout is not None
        while piece := follower.stdout.read1(1 << 16):  # type: ignore[attr-defined]  # a buffered reader
            got.extend(piece)

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    wait_until(lambda: got, "the log comes")
    net.wire.loss = 1.0  # a laptop asleep, a cable out: no packet, no reset
    wait_until(lambda: b"lost" in (laptop.home / "remarks").read_bytes(), "the follower notices by itself")
    net.wire.loss = 0.0
    so_far = log.stat().st_size
    wait_until(lambda: len(got) > so_far, "the follower comes back")
    end_run(laptop.remote())
    assert follower.wait(PATIENCE_S) == 0
    reader.join(PATIENCE_S)
    assert hashlib.sha256(got).hexdigest() == hashlib.sha256(log.read_bytes()).hexdigest()


def test_no_host_at_the_other_end(far: tuple[Laptop, Network]) -> None:
    laptop, net = far
    net.wire.loss = 1.0
    laptop.write_hosts(ssh={"connect_timeout": 2})
    done = laptop.fab("status")
    assert done.returncode == 10, done.stdout + done.stderr
    assert "no answer in time" in done.stderr
