"""An operator's checkout of this repository, and `fab` in it: what every test of the command line starts from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.waiting import PATIENCE_S

REPOSITORY = Path(__file__).parents[1]


@dataclass
class Operator:
    """Someone with a checkout under a home of their own. It has no trainer yet and no hosts.yaml."""

    home: Path
    extra: dict[str, str] = field(default_factory=dict, kw_only=True)
    """More environment for `fab`."""
    started: list[subprocess.Popen[bytes]] = field(default_factory=list, kw_only=True)

    def __post_init__(self) -> None:
        self.checkout.mkdir(parents=True)
        for name in ("fabfile.py", "fabric.yaml"):
            shutil.copy(REPOSITORY / name, self.checkout / name)
        (self.checkout / "dflash_ops").symlink_to(REPOSITORY / "dflash_ops")

    @property
    def checkout(self) -> Path:
        return self.home / "checkout"

    @property
    def hosts_file(self) -> Path:
        return self.checkout / "hosts.yaml"

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "HOME": str(self.home), "LAPTOP_SECRET": "leak", **self.extra}

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "fabric", *words]

    def fab(self, *words: str, timeout: float = PATIENCE_S, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run `fab` to its end, as an operator would in the checkout."""
        return subprocess.run(
            self.command(*words),
            cwd=self.checkout,
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start_fab(self, *words: str, stderr: int | IO[bytes] = subprocess.PIPE) -> subprocess.Popen[bytes]:
        """Start `fab` in a session of its own, so that a test can send it what a terminal would."""
        process = subprocess.Popen(
            self.command(*words),
            cwd=self.checkout,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def end_started(self) -> None:
        """Kill what `start_fab` has started and is still going."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
