"""A checkout of its own for each test, with the stand-in trainer and a `local` target under a short path."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dflash_ops import console
from dflash_ops import launch as launching
from dflash_ops import release as releasing
from dflash_ops.agent import process, runs
from dflash_ops.agent.layout import Layout
from dflash_ops.hosts import load
from dflash_ops.remote import Place, Remote
from dflash_ops.settings import Target
from dflash_ops.transport.local import LocalTransport
from tests.checkout import Operator
from tests.ops import standin
from tests.waiting import wait_until

HOSTS = """\
default: local
targets:
  local:
    via: local
    root: {root}
    launcher: {launcher}
    min_free_gib: 0
    env: {{STANDIN_TOKEN: secret-value}}
"""


@dataclass
class Lab(Operator):
    """An operator whose one target is this machine."""

    root: Path = field(init=False)
    """Of the target; a test may move it before `write_hosts`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.root = self.home / "root"

    @property
    def layout(self) -> Layout:
        return Layout(self.root, self.root)

    @property
    def target(self) -> Target:
        return load(self.hosts_file).targets["local"]

    @property
    def remote(self) -> Remote:
        return Remote(LocalTransport(), Place(sys.executable, str(self.root), str(self.root)))

    def status(self, *words: str) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.fab("status", "--json", *words).stdout)
        return body

    def newest(self) -> runs.RunStatus:
        found = runs.find(self.layout, "")
        assert found is not None
        return found

    def deploy(self) -> None:
        """What `fab deploy` does, without starting it."""
        releasing.deploy(self.remote, releasing.collect(self.checkout), "test", lambda _: None, console.upload)

    def launch(self, *words: str) -> runs.RunStatus:
        """What `fab launch --set k=v ...` does, without starting it; waits until the run trains.

        For runs that do not end by themselves: to train is a passing state of any other.
        """
        assert any(word.startswith("standin.steps=") for word in words)
        self.start(*words)
        return self.wait_for("training")

    def start(self, *settings: str, keep_alive: int = 0) -> None:
        """Launch without waiting for anything: for runs that end at once."""
        options = launching.LaunchOptions("threadwarm", settings, keep_alive=keep_alive)
        launching.launch(self.remote, self.target, options, "test", lambda _: None)

    def wait_for(self, *states: str) -> runs.RunStatus:
        def reached() -> runs.RunStatus | None:
            found = runs.find(self.layout, "")
            return found if found is not None and found.state in states else None

        found: runs.RunStatus = wait_until(reached, f"state {' or '.join(states)}")
        return found

    def write_hosts(self, launcher: str = "nohup") -> None:
        self.hosts_file.write_text(HOSTS.format(root=self.root, launcher=launcher))

    def end_everything(self) -> None:
        """End what the test left running, each process by the identity in its record."""
        self.end_started()
        for directory in runs.directories(self.layout):
            record = runs.read_run(directory)
            for identity in (record.supervisor, record.trainer) if record else ():
                if identity is not None:
                    with contextlib.suppress(OSError):
                        process.send(identity, signal.SIGKILL)
                    process.wait_gone(identity, 30.0)
        if self.layout.tmux_socket.exists():
            subprocess.run(
                ["tmux", "-S", str(self.layout.tmux_socket), "kill-server"], capture_output=True, check=False
            )


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Started with nohup: the quickest launcher. Tests of tmux write hosts.yaml anew."""
    base = Path(tempfile.mkdtemp(prefix="dflash-"))  # short: a tmux socket must fit into 100 bytes
    made = Lab(base)
    standin.write(made.checkout)
    made.write_hosts()
    try:
        yield made
    finally:
        made.end_everything()
        shutil.rmtree(base, ignore_errors=True)
