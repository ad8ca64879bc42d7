"""A peer that freezes in the middle of a verb: the verb ends within its deadline, with 10 or 124.

The deadlines are made short here; what is tested is that nothing waits past them. Shown able to fail: with the read of
a call's output unbounded, these went red; with `remote.SILENCE_S` unused, `pull` and `prune` did.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator

import paramiko
import pytest
from invoke.config import Config

from dflash_ops import care, cli, connect, launch, reading, release, remote, tail, tasks
from dflash_ops.executor import TargetContext
from dflash_ops.transport.ssh import SshTransport
from tests.sandbox.box import send
from tests.sandbox.laptop import Laptop
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.sandbox

SHORT = {
    tasks: ("READ_DEADLINE_S", "STOP_SPARE_S"),
    reading: ("READ_DEADLINE_S",),
    launch: ("LAUNCH_DEADLINE_S", "GATE_DEADLINE_S", "PROBE_DEADLINE_S", "STATUS_DEADLINE_S", "RESOLVE_S"),
    release: ("SELECT_DEADLINE_S", "INSTALL_DEADLINE_S"),
    remote: ("GRACE_S", "SILENCE_S"),
    tail: ("SILENCE_S", "PATIENCE_S"),
}
VERBS: dict[str, Callable[[TargetContext], int]] = {
    "status": lambda c: reading.status(c),
    "runs": lambda c: reading.runs(c),
    "releases": lambda c: reading.releases(c),
    "deploy": lambda c: tasks.deploy(c),
    "deploy --dry-run": lambda c: tasks.deploy(c, dry_run=True),
    "launch": lambda c: tasks.launch(c, variant="sdpa"),
    "tail-log": lambda c: reading.tail_log(c),
    "stop": lambda c: tasks.stop(c, wait="1"),
    "gpus": lambda c: reading.gpus(c),
    "preflight": lambda c: reading.preflight(c),
    "rollback": lambda c: tasks.rollback(c),
    "clear-cache": lambda c: tasks.clear_cache(c),
    "watch": lambda c: care.watch(c),
    "report": lambda c: care.report(c, "newest"),
    # These may work for an hour: only the missing signs of life can end them.
    "pull": lambda c: care.pull(c),
    "prune": lambda c: care.prune(c, dry_run=True),
}
EXPLAINS: dict[str, Callable[[TargetContext], int]] = {
    "diagnose": lambda c: care.diagnose(c),
    "doctor": lambda c: care.doctor(c, quick=True),
}
"""Verbs that report a frozen peer as a finding instead of failing on it."""


@pytest.fixture
def context(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> Iterator[TargetContext]:
    monkeypatch.setattr(tasks.hosts, "checkout", lambda: laptop.checkout)
    # The handshake may take its time; the short deadlines are for a peer that freezes after it.
    host = connect.connect(laptop.target).transport.host()
    assert isinstance(host, SshTransport)
    with host.link.channel(time.monotonic() + PATIENCE_S):
        pass
    for module, names in SHORT.items():
        for name in names:
            monkeypatch.setattr(module, name, 1.0)
    yield TargetContext(Config(), (laptop.target,), "ct200")
    connect.close_all()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb(verb: str, laptop: Laptop, context: TargetContext, monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_of(lambda: VERBS[verb](context), laptop, monkeypatch) in (10, 124)


@pytest.mark.parametrize("verb", EXPLAINS)
def test_verbs_that_explain(verb: str, laptop: Laptop, context: TargetContext, monkeypatch: pytest.MonkeyPatch) -> None:
    code_of(lambda: EXPLAINS[verb](context), laptop, monkeypatch)


def code_of(body: Callable[[], int], laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of `body`, whose peer freezes as soon as it has a command; fails when it still waits."""
    plain = paramiko.Channel.exec_command
    frozen = threading.Event()

    def exec_then_freeze(channel: paramiko.Channel, command: str) -> None:
        plain(channel, command)
        for pid in laptop.box.sshd.sessions():
            send(pid, signal.SIGSTOP)
        frozen.set()

    monkeypatch.setattr(paramiko.Channel, "exec_command", exec_then_freeze)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(cli.guarded(body)), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    for pid in laptop.box.sshd.sessions():
        send(pid, signal.SIGCONT)
    assert frozen.is_set()
    assert codes, "it still waits"
    return codes[0]
