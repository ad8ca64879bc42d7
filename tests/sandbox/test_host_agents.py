"""The agent also goes to the Proxmox host, to look at the GPUs from there; old versions of it do not pile up.

Shown able to fail: with agents removed only at the end of a deploy, all of them stayed.
"""

from __future__ import annotations

import os
import time

import pytest

from dflash_ops.agent.retire import KEPT
from dflash_ops.bundle import agent_bundle
from tests.sandbox.laptop import Laptop

pytestmark = pytest.mark.sandbox


def test_any_call_to_the_host_leaves_the_newest_few(laptop: Laptop) -> None:
    agents = laptop.box.sshd.home / "root" / ".local/share/dflash-ops/agents"
    agents.mkdir(parents=True, exist_ok=True)
    old = [agents / f"{number:064x}.pyz" for number in range(12)]
    try:
        for age, path in enumerate(old, start=2):
            path.write_bytes(b"")
            when = time.time() - age * 86400.0
            os.utime(path, (when, when))
        done = laptop.fab("gpus")
        assert "Traceback" not in done.stderr
        left = {path.name.partition(".")[0] for path in agents.iterdir()}
        assert left == {agent_bundle().sha256, *(path.stem for path in old[:KEPT])}
    finally:
        for path in old:
            path.unlink(missing_ok=True)
