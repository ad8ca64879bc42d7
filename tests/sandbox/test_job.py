"""The whole job by `fab`, through SSH and pct into a container, with the real trainer on its CPU.

Shown able to fail: with a rollback that does not move `current`, this went red.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sandbox.box import Box
from tests.sandbox.laptop import Laptop
from tests.waiting import wait_until

pytestmark = pytest.mark.sandbox

QUICK = ("run.eval_every=2", "run.checkpoint_every=2", "run.log_every=1", "run.tensorboard=false")


def test_deploy_launch_follow_status_stop_rollback(box: Box, tmp_path: Path) -> None:
    laptop = Laptop(tmp_path, box, "job")
    laptop.real_trainer()
    laptop.write_hosts(launcher="tmux", train={word.split("=")[0]: _value(word) for word in QUICK})
    try:
        _whole_job(laptop)
    finally:
        laptop.end_everything()


def _whole_job(laptop: Laptop) -> None:
    done = laptop.fab("deploy", "launch", "--variant", "sdpa", "--set", "run.max_steps=4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is deployed" in done.stdout
    assert "is started" in done.stdout
    first = laptop.layout.current.readlink().name

    followed = laptop.fab("tail-log", "--lines", "all")
    assert followed.returncode == 0, followed.stdout + followed.stderr
    assert "[dflash] release " + first in followed.stdout
    assert "host ct200" in followed.stdout
    assert "is finished" in followed.stderr
    assert "step" in followed.stdout

    status = laptop.fab("status", "--json")
    assert status.returncode == 0
    assert '"state": "finished"' in status.stdout

    # A second release, whose run is stopped in the middle.
    (laptop.checkout / "trainer" / "note.py").write_text('"""A change."""\n')
    done = laptop.fab("deploy", "launch", "--variant", "sdpa", "--set", "run.max_steps=100000")
    assert done.returncode == 0, done.stdout + done.stderr
    remote = laptop.remote()
    wait_until(lambda: laptop.status(remote).state == "training", "the run trains")
    assert laptop.fab("deploy", "launch", "--variant", "sdpa").returncode in (20, 21)  # one run at a time
    assert laptop.fab("stop", "--wait", "120").returncode == 0
    assert "stopped" in laptop.fab("status").stdout

    back = laptop.fab("rollback")
    assert back.returncode == 0, back.stdout + back.stderr
    assert laptop.layout.current.readlink().name == first


def _value(word: str) -> object:
    text = word.split("=")[1]
    return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)
