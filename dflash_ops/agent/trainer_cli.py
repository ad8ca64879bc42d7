"""The trainer's command line, as far as the launch needs it before a run exists. Torch is not imported for these."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

from dflash_ops.errors import DeadlineExceeded, UsageError

ASK_S = 60.0


def train_argv(variant: str, release: str, directory: Path, overrides: dict[str, str]) -> tuple[str, ...]:
    words = ("--variant", variant, "--release", release, "--run-dir", str(directory), *_settings(overrides))
    return (sys.executable, "-m", "trainer", "train", *words)


def check_config(release: Path, env: dict[str, str], variant: str, overrides: dict[str, str]) -> None:
    """Let the trainer itself judge variant and overrides; raises UsageError with its own words where it refuses.

    Also where the text or the target that the run would read is not on this machine.
    """
    done = _ask(release, env, ["config", "--variant", variant, *_settings(overrides)])
    if done.returncode == 0:
        _require_paths(release, done.stdout)
        return
    said = done.stderr.strip().splitlines()
    reason = said[-1].removeprefix("error: ") if said else f"exit code {done.returncode}"
    variants: list[str] = []
    if "variant" in reason:
        variants = [line.split()[0] for line in _ask(release, env, ["variants"]).stdout.splitlines() if line.strip()]
    raise UsageError(
        f"the trainer refuses this configuration: {reason}",
        why=f"the variants are {', '.join(variants)}" if variants and variants[0] not in reason else "",
        hint="choose a variant with --variant and correct --set; `python -m trainer config --variant V` shows all keys",
    )


def _require_paths(release: Path, configuration: str) -> None:
    try:
        found = json.loads(configuration)
        paths = {"data.source": found["data"]["source"], "target.path": found["target"]["path"]}
    except (ValueError, KeyError, TypeError):
        return  # an older trainer's words; it finds out itself
    for key, value in paths.items():
        if value in ("stdlib", "tiny") or str(value).startswith("shape:"):
            continue
        path = release / Path(str(value)).expanduser()  # the trainer runs in its release's directory
        if not path.exists():
            raise UsageError(
                f"{key} {value!r} is not on the target",
                why=f"no {path} there",
                hint=f"copy it there (from a hub: `hf download`), or name what is there with --set {key}=PATH",
            )


def environment(extra: dict[str, str]) -> dict[str, str]:
    """What the trainer gets: fixed basics of this machine, then what the caller adds. Nothing is inherited."""
    user = pwd.getpwuid(os.getuid())
    base = {
        "HOME": os.environ.get("HOME") or user.pw_dir,
        "USER": user.pw_name,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PATH": f"{Path(sys.executable).parent}:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:"
        "/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # so that cuda:N is the N of nvidia-smi
    }
    return base | extra


def _settings(overrides: dict[str, str]) -> list[str]:
    return [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]


def _ask(release: Path, env: dict[str, str], words: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [sys.executable, "-m", "trainer", *words],
            cwd=release,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(f"`python -m trainer {words[0]}` did not answer within {ASK_S:.0f} s") from None
