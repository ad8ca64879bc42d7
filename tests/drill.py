"""Running the command blocks of a runbook, each where it says, each to the exit code it promises."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.runbook import ROOT, Fence, fences
from tests.waiting import PATIENCE_S

PARTS = ("How to confirm", "Fix", "Verify")
SHELL = ("/bin/bash", "-euc")

Run = Callable[[str, Mapping[str, str]], subprocess.CompletedProcess[str]]


@dataclass(frozen=True)
class Places:
    """How a block's script is run in each place; the mapping holds the page's variables."""

    laptop: Run
    host: Run
    container: Run


@dataclass(frozen=True, slots=True)
class Step:
    """One block that ran, and what it said."""

    fence: Fence
    said: str


def play(page: str, places: Places, variables: Mapping[str, str], parts: Sequence[str] = PARTS) -> list[Step]:
    """Run a page's blocks in order; fails at the first that does not end as the page says."""
    steps = []
    for fence in fences(ROOT / "runbooks" / f"{page}.md"):
        if fence.section not in parts or not fence.runs:
            continue
        run: Run = getattr(places, fence.place)
        done = run(fence.script, variables)
        said = done.stdout + done.stderr
        where = f"{page}.md, {fence.section}, on the {fence.place}:\n{fence.script}\n"
        assert done.returncode == fence.exit_code, f"{where}ended with {done.returncode}:\n{said}"
        assert "Traceback" not in done.stderr, f"{where}{said}"
        steps.append(Step(fence, said))
    return steps


def tools(directory: Path) -> Path:
    """A directory for PATH with `fab` and `python` as the operator's shell has them."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, words in (("fab", f"{sys.executable} -m fabric"), ("python", sys.executable)):
        program = directory / name
        program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        program.chmod(0o755)
    return directory


def shell(path: Path | str, cwd: Path, environment: Mapping[str, str], prefix: Sequence[str] = ()) -> Run:
    """Run scripts by bash on this machine, with `path` first in PATH."""

    def run(script: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*prefix, *SHELL, script],
            cwd=cwd,
            env={**environment, **variables, "PATH": f"{path}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    return run
