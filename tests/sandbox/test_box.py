"""The sandbox leaves nothing behind, even when its run is killed outright.

Shown able to fail: with `sweep` looking at no directory, this went red.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sandbox import box as sandbox
from tests.waiting import wait_until

pytestmark = pytest.mark.sandbox

HOLD = """
import sys, time
from tests.sandbox import box
with box.box() as made:
    print(made.home, made.sshd.process.pid, flush=True)
    time.sleep(600)
"""


def test_a_killed_run_is_swept_by_the_next(shared_box: sandbox.Box) -> None:
    repository = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, cwd=repository) as holder:
        assert holder.stdout is not None
        home, listener = holder.stdout.readline().split()
        assert home in Path("/proc/self/mounts").read_text()
        holder.kill()
    sandbox.sweep()
    assert not Path(home).exists()
    assert home not in Path("/proc/self/mounts").read_text()
    wait_until(lambda: home not in _command_line(int(listener)), "its sshd is gone")
    assert shared_box.container.running()  # and the sweep left a live run alone


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
