"""The container's Python environment, built from a hashed lock beside the one in use.

    root/envs/<16 digits of the lock's hash>/    complete once it holds the file `complete`
    root/env -> envs/<...>                       what `python: <root>/env/bin/python` in hosts.yaml means

The link moves in one step and only after the new environment has shown that it works, so a failed build changes
nothing. The same lock is the same environment: nothing is built twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from dflash_ops.agent import doctor, files, gpus, nvidia_smi, trainer_cli
from dflash_ops.agent.layout import Layout
from dflash_ops.errors import EnvironmentUnfit, LockHeld, UploadCorrupt, UsageError

BUILT_LAST = ("causal-conv1d",)
"""Built from source against the torch that the first step has installed."""
BUILD_LIMIT_S = 3300.0
WHEEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+!-]{0,200}\.(?:whl|tar\.gz)\Z")
SPARE_BYTES = 1 << 30

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ProvisionRequest:
    """`lock` is the text of a requirements file in which every line has its hashes."""

    who: str
    lock: str
    wheelhouse: bool = False
    """Take packages only from what was uploaded to root/wheelhouse; never from a network."""


@dataclass(frozen=True, slots=True)
class Provisioned:
    """`built` is False where this environment was there already."""

    environment: str
    python: str
    built: bool
    previous: str | None


@dataclass(frozen=True, slots=True)
class WheelRequest:
    """One file of the wheelhouse. With an empty payload: is it there already?"""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class WheelAnswer:
    present: bool


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock split into what is installed first and what is built against it."""

    name: str
    first: str
    last: str
    distributions: tuple[str, ...] = field(default=())


def read_lock(text: str) -> Lock:
    """Split a lock; UsageError where a requirement is not pinned or has no hash."""
    first: list[str] = []
    last: list[str] = []
    names: list[str] = []
    joined = re.sub(r"\\\s*\n", " ", text)
    for number, raw in enumerate(joined.splitlines(), 1):
        line = re.sub(r"(?:^|\s)#.*", "", raw).strip()
        if not line:
            continue
        match = re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[a-z0-9,_-]+\])?==[^\s;]+", line)
        if match is None:
            raise UsageError(
                f"the lock's requirement {number} is not pinned: {line[:80]!r}",
                hint="every line must read name==version --hash=sha256:...",
            )
        if not re.search(r"--hash=sha256:[0-9a-f]{64}\b", line):
            raise UsageError(f"the lock has no hash for {match[1]}", hint="pip-compile --generate-hashes writes them")
        name = re.sub(r"[-_.]+", "-", match[1]).lower()
        names.append(name)
        (last if name in BUILT_LAST else first).append(line)
    if not names:
        raise UsageError("the lock is empty", hint="name a requirements file with hashes: --lock FILE")
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Lock(digest, "\n".join(first) + "\n", "\n".join(last) + "\n" if last else "", tuple(names))


def provision(layout: Layout, request: ProvisionRequest, say: Say) -> Provisioned:
    """Build, prove, switch. Raises EnvironmentUnfit with the environment in use untouched."""
    lock = read_lock(request.lock)
    base = layout.root / "envs"
    base.mkdir(parents=True, exist_ok=True)
    descriptor = files.try_lock(base / "lock")
    if descriptor is None:
        raise LockHeld("another provision is under way on this target", hint="wait for it")
    try:
        files.sweep_trash(base)
        home = base / lock.name
        built = not (home / "complete").exists()
        if built:
            _build(layout, home, lock, say, offline=request.wheelhouse)
        link = layout.root / "env"
        previous = link.readlink().name if link.is_symlink() else None
        if previous != lock.name:
            files.flip_link(link, f"envs/{lock.name}")
        return Provisioned(str(home), str(link / "bin" / "python"), built, previous)
    except OSError as error:
        raise files.disk_error(error, "building the environment") from None
    finally:
        os.close(descriptor)


def take_wheel(layout: Layout, request: WheelRequest, payload: BinaryIO, size: int) -> WheelAnswer:
    """Store one file of the wheelhouse under its own name, if its hash is right."""
    if not WHEEL.match(request.name):
        raise UsageError(f"{request.name!r} is no wheel's name")
    house = layout.root / "wheelhouse"
    house.mkdir(parents=True, exist_ok=True)
    path = house / request.name
    if size == 0:
        return WheelAnswer(path.is_file() and _sha256(path) == request.sha256)
    data = payload.read(size)
    if hashlib.sha256(data).hexdigest() != request.sha256:
        raise UploadCorrupt(f"{request.name} arrived altered", why=f"{len(data)} of {size} bytes")
    files.write_whole(path, data, 0o644)
    return WheelAnswer(present=True)


def card_architectures() -> str:
    """The compute capabilities of the cards here, as TORCH_CUDA_ARCH_LIST wants them: `9.0`; empty without a card."""
    smi = gpus.find_program()
    if smi is None:
        return ""
    try:
        text = nvidia_smi.ask([smi, "--query-gpu=uuid,compute_cap", "--format=csv"], 20.0)
        rows = nvidia_smi.rows(text, last="uuid")
    except nvidia_smi.Fault:
        return ""
    found = {row.get("compute_cap", "") for row in rows}
    return ";".join(sorted(value for value in found if re.fullmatch(r"\d{1,2}\.\d", value)))


def _build(layout: Layout, home: Path, lock: Lock, say: Say, *, offline: bool) -> None:
    files.remove_aside(home)  # what a build that was cut has left
    space = os.statvfs(layout.root)
    if space.f_bavail * space.f_frsize < SPARE_BYTES and "torch" in lock.distributions:
        raise EnvironmentUnfit("too little disk for an environment", hint="free space under root, then try again")
    env = trainer_cli.environment({"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"})
    if arch := card_architectures():
        env |= {"TORCH_CUDA_ARCH_LIST": arch, "CAUSAL_CONV1D_FORCE_BUILD": "TRUE"}
        say(f"extensions are built for compute capability {arch} only")
    python = str(home / "bin" / "python")
    try:
        _run([os.path.realpath(_base_python()), "-m", "venv", str(home)], env, say, "making the environment")
        pip = [python, "-m", "pip", "install", "--no-cache-dir", "--require-hashes", "--progress-bar", "off"]
        if offline:
            pip += ["--no-index", "--find-links", str(layout.root / "wheelhouse")]
        for name, text, extra in (("lock.txt", lock.first, []), ("last.txt", lock.last, ["--no-build-isolation"])):
            if text.strip():
                (home / name).write_text(text)
                _run([*pip, *extra, "-r", str(home / name)], env, say, f"installing {name}")
        _prove(python, env, lock, say)
    except EnvironmentUnfit:
        files.remove_aside(home)
        raise
    (home / "complete").write_text(json.dumps({"time": time.time(), "distributions": lock.distributions}) + "\n")


def _base_python() -> str:
    """The interpreter below the agent's own: an environment must not be built upon an environment."""
    return getattr(sys, "_base_executable", "") or sys.executable


def _prove(python: str, env: dict[str, str], lock: Lock, say: Say) -> None:
    """Everything in the lock is there; where torch is among it, it computes."""
    listed = json.dumps(list(lock.distributions))
    code = f"import importlib.metadata as m; [m.version(n) for n in {listed}]"
    _run([python, "-I", "-c", code], env, say, "checking what is installed")
    if "torch" not in lock.distributions:
        return
    say("smoke test: a small matmul on each card")
    cards = bool(list(Path("/dev").glob("nvidia[0-9]*")))
    for line in doctor.smoke(doctor.DoctorRequest(slow_kernels_allowed=not lock.last), on_gpus=cards, python=python):
        if line.verdict == "bad":
            raise EnvironmentUnfit(
                f"the new environment does not work: {line.name}",
                why=line.detail,
                hint="the environment in use was not touched; correct the lock and provision again",
            )


def _run(argv: list[str], env: dict[str, str], say: Say, what: str) -> None:
    """Run to the end, passing on the lines; EnvironmentUnfit with the last ones where it fails or takes too long."""
    say(what)
    ends_at = time.monotonic() + BUILD_LIMIT_S
    last: list[str] = []
    with subprocess.Popen(
        argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/"
    ) as child:
        assert child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            buffer = b""
            while time.monotonic() < ends_at:
                if not selector.select(5.0):
                    say("")  # a sign of life for the connection
                    continue
                piece = os.read(child.stdout.fileno(), 1 << 16)
                if not piece:
                    break
                *lines, buffer = (buffer + piece).split(b"\n")
                for line in lines:
                    text = line.decode("utf-8", "replace").strip()[:300]
                    if text:
                        last = [*last[-5:], text]
                        say(text)
            else:
                child.kill()
        code = child.wait()
    if code != 0:
        raise EnvironmentUnfit(
            f"{what} failed",
            why="; ".join(line for line in last[-3:]) or f"exit code {code}",
            hint="the environment in use was not touched",
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
