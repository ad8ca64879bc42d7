"""The operator's side of the sandbox: a checkout whose hosts.yaml leads through SSH and pct into container 200."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dflash_ops import connect, hosts
from dflash_ops.agent import messages
from dflash_ops.agent.layout import Layout
from dflash_ops.agent.runs import RunStatus
from dflash_ops.remote import Place, Remote
from dflash_ops.settings import Target
from tests.checkout import REPOSITORY, Operator
from tests.ops import standin
from tests.sandbox.box import Box
from tests.waiting import PATIENCE_S


@dataclass
class Laptop(Operator):
    """One operator with one target, `ct200`. Paths on the target are new for each test."""

    box: Box
    name: str
    place: str = ""
    """A network namespace to run `fab` in; empty: this machine's own."""
    remotes: list[Remote] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.known_hosts.write_text(self.box.sshd.known_hosts_line())
        (self.home / "ssh_config").touch()
        self.write_hosts()

    @property
    def known_hosts(self) -> Path:
        return self.home / "known_hosts"

    @property
    def root(self) -> str:
        """The target's root, as the container sees it."""
        return f"/root/{self.name}"

    @property
    def layout(self) -> Layout:
        """The target's files, as this machine sees them."""
        root = Path(f"{self.box.container.rootfs}{self.root}")
        return Layout(root, root)

    @property
    def target(self) -> Target:
        return hosts.load(self.hosts_file).targets["ct200"]

    def standin_trainer(self) -> None:
        """A trainer without torch."""
        standin.write(self.checkout)

    def real_trainer(self) -> None:
        shutil.copytree(REPOSITORY / "trainer", self.checkout / "trainer", ignore=shutil.ignore_patterns("__pycache__"))

    def settings(self, **changes: Any) -> dict[str, Any]:
        """ct200's entry in hosts.yaml. `ssh` is merged, everything else replaced."""
        ssh = {
            "host": self.box.sshd.address,
            "port": self.box.sshd.port,
            "user": "root",
            "identity": str(self.box.sshd.identity),
            "known_hosts": str(self.known_hosts),
            "config": str(self.home / "ssh_config"),
            "connect_timeout": 30,
            **changes.pop("ssh", {}),
        }
        return {
            "via": "pct",
            "ssh": ssh,
            "vmid": 200,
            "pct": str(self.box.pct),
            "python": sys.executable,
            "root": self.root,
            "launcher": "nohup",
            "min_free_gib": 0,
            "env": {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            **changes,
        }

    def write_hosts(self, targets: dict[str, dict[str, Any]] | None = None, **changes: Any) -> None:
        """hosts.yaml with ct200 (changed as said), or with other targets altogether."""
        body = {"default": "ct200", "targets": targets or {"ct200": self.settings(**changes)}}
        self.hosts_file.write_text(yaml.safe_dump(body))

    def remote(self) -> Remote:
        """The target's agent, called from this process (and so from this network namespace)."""
        target = self.target
        made = Remote(connect.open_transport(target), Place(target.python, target.root, target.workspace))
        self.remotes.append(made)
        return made

    def command(self, *words: str) -> list[str]:
        return [*self.elsewhere, *super().command(*words)]

    @property
    def elsewhere(self) -> list[str]:
        return ["ip", "netns", "exec", self.place] if self.place else []

    def status(self, remote: Remote) -> RunStatus:
        found = remote.call("status", messages.StatusRequest(), messages.Overview, deadline=PATIENCE_S).run
        assert found is not None
        return found

    def end_everything(self) -> None:
        """End what the test started, here and in the container."""
        self.end_started()
        for remote in self.remotes:
            remote.transport.close()
        if self.box.container.running():
            # Every process of the container but its init; the pid namespace keeps the signal inside.
            self.box.container.run("/bin/sh", "-c", "kill -9 -1", check=False)
