"""Is this machine fit? One line for each question, with a verdict and a fix. Looks; changes nothing."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.agent import gate, gpus, launchers, machine, process, trainer_cli
from dflash_ops.agent.gpu_facts import NO_NVIDIA_SMI, OK
from dflash_ops.agent.layout import Layout

SMOKE_S = 180.0
SHM_BYTES = 1 << 30
RECURRENCE, CONVOLUTION = "fla.ops.gated_delta_rule", "causal_conv1d"
"""Kernels of a hybrid target. The second is for what runs transformers' own forward: decoding, documents one by one."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")

# Run by the target's own Python, apart from the agent: importing torch takes seconds and may crash.
SMOKE = """\
import json, sys
found = {}
try:
    import torch
    found["torch"] = torch.__version__
    found["cuda"] = torch.version.cuda
    found["cards"] = torch.cuda.device_count()
    found["bad"] = []
    for index in range(found["cards"]):
        try:
            x = torch.full((256, 256), 2.0, device=f"cuda:{index}", dtype=torch.bfloat16)
            if float((x @ x)[3, 7]) != 1024.0:
                found["bad"].append(f"cuda:{index} computes wrongly")
        except Exception as error:
            found["bad"].append(f"cuda:{index}: {type(error).__name__}: {error}".splitlines()[0])
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
# transformers picks the kernels of a hybrid target at import by whether these can be imported.
for name in ("fla.ops.gated_delta_rule", "causal_conv1d"):
    try:
        __import__(name)
        found[name] = True
    except Exception as error:
        found[name] = f"{name}: {type(error).__name__}: {error}".splitlines()[0]
sys.stdout.write("@" + json.dumps(found) + "\\n")
"""


@dataclass(frozen=True, slots=True)
class DoctorRequest:
    """What hosts.yaml expects. `quick` leaves out what imports torch."""

    gpu_count: int | None = None
    min_free_gib: int = 1
    slow_kernels_allowed: bool = False
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """One answer. `verdict` is ok, note (worth knowing) or bad (fix it before training)."""

    place: str
    name: str
    verdict: str
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Examined:
    """All lines; `time` is this machine's clock, `driver` its NVIDIA driver where there is one."""

    lines: tuple[Line, ...]
    time: float
    driver: str | None = None


def container(layout: Layout, request: DoctorRequest) -> Examined:
    """Everything about the machine that trains."""
    lines = [_python(), *_packages(request), *_disks(layout, request), _shm(), *_memory(), _cpus(), _launcher()]
    facts = gpus.probe("container", samples=1)
    wanted = request.gpu_count
    if facts.state == NO_NVIDIA_SMI and not facts.device_files:
        verdict = "bad" if wanted else "note"
        lines.append(_line("GPUs", verdict, "none here: training runs on the CPU", "check the container's devices"))
    elif facts.state != OK:
        lines.append(_line("GPUs", "bad", facts.problem, "runbooks/driver-mismatch.md, runbooks/gpu-lost.md"))
    else:
        detail = f"{len(facts.cards)} x {facts.cards[0].name}, driver {facts.driver_version}"
        right = wanted is None or len(facts.cards) == wanted
        lines.append(_line("GPUs", "ok" if right else "bad", detail, f"{wanted} are expected: runbooks/gpu-lost.md"))
    if facts.device_files:
        there = Path("/dev/nvidia-uvm").exists()
        detail = "/dev/nvidia-uvm is there" if there else "/dev/nvidia-uvm is missing: CUDA cannot start"
        lines.append(_line("devices", "ok" if there else "bad", detail, "runbooks/uvm-missing.md"))
    if not request.quick:
        lines += smoke(request, on_gpus=bool(facts.device_files))
    lines += _left_behind(layout)
    return Examined(tuple(lines), time.time(), facts.driver_version)


def host() -> Examined:
    """The machine below a container."""
    lines = [Line("host", "kernel", "ok", platform.release())]
    pve = machine.said_by(["/usr/bin/pveversion"], 10.0)
    if pve:
        lines.append(Line("host", "Proxmox", "ok", pve.strip().splitlines()[0]))
    driver = None
    if DRIVER_FILE.exists():
        words = DRIVER_FILE.read_text(errors="replace").split()
        driver = next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), None)
        lines.append(Line("host", "driver", "ok", f"kernel module {driver}"))
        if not Path("/dev/nvidia-uvm").exists():
            fix = "nvidia-modprobe -u -c=0 on the host; runbooks/uvm-missing.md"
            lines.append(Line("host", "devices", "bad", "/dev/nvidia-uvm is missing", fix))
    facts = gpus.probe("host", samples=1)
    if facts.kernel_log:
        detail = f"{len(facts.kernel_log)} driver faults in the kernel log, the last: {facts.kernel_log[-1]}"
        lines.append(Line("host", "kernel log", "note", detail, "runbooks/gpu-lost.md"))
    if facts.pci_cards is not None and facts.state == OK and facts.pci_cards > len(facts.cards):
        detail = f"{facts.pci_cards} cards on the bus, the driver shows {len(facts.cards)}"
        lines.append(Line("host", "GPUs", "bad", detail, "runbooks/gpu-lost.md"))
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    verdict = "ok" if load < cores else "note"
    lines.append(Line("host", "load", verdict, f"{load:.1f} on {cores} cores", "see what else runs there"))
    return Examined(tuple(lines), time.time(), driver)


def _line(name: str, verdict: str, detail: str, fix: str = "") -> Line:
    return Line("container", name, verdict, detail, "" if verdict == "ok" else fix)


def _python() -> Line:
    return _line("Python", "ok", f"{platform.python_version()} at {sys.executable}")


def _packages(request: DoctorRequest) -> list[Line]:
    versions = gate.installed_versions()
    on_gpus = bool(request.gpu_count)
    wanted = gate.NEEDED + (gate.NEEDED_WITH_GPUS if on_gpus and not request.slow_kernels_allowed else ())
    missing = [name for name in wanted if name not in versions]
    found = ", ".join(f"{name} {versions[name]}" for name in wanted if name in versions)
    detail = f"missing: {', '.join(missing)}; found: {found or 'nothing'}" if missing else found
    lines = [_line("packages", "bad" if missing else "ok", detail, "`fab provision`; runbooks/environment-unfit.md")]
    torch = versions.get("torch", "")
    if torch.startswith("2.12."):
        lines.append(_line("torch", "bad", f"{torch} deadlocks in threads", "runbooks/upgrade-torch.md"))
    return lines


def _disks(layout: Layout, request: DoctorRequest) -> list[Line]:
    lines, seen = [], set()
    for name, path in (("workspace", layout.workspace), ("root", layout.root)):
        at = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
        device = at.stat().st_dev
        disk = machine.disk(at)
        if disk is None or device in seen:
            continue
        seen.add(device)
        short = disk.full or disk.free_bytes < request.min_free_gib << 30
        few = disk.total_inodes > 0 and disk.free_inodes < gate.MIN_FREE_INODES
        detail = (
            f"{disk.free_bytes / 2**30:,.1f} of {disk.total_bytes / 2**30:,.1f} GiB, {disk.free_inodes:,} inodes free"
        )
        verdict = "bad" if short or few else "ok"
        lines.append(_line(f"disk {name}", verdict, f"{detail} at {path}", "`fab prune`; runbooks/disk-full.md"))
    return lines


def _shm() -> Line:
    disk = machine.disk(Path("/dev/shm"))
    if disk is None:
        return _line("/dev/shm", "note", "not mounted", "mount a tmpfs there")
    verdict = "ok" if disk.free_bytes >= SHM_BYTES else "note"
    return _line(
        "/dev/shm", verdict, f"{disk.free_bytes / 2**30:,.1f} GiB free", "mount it larger: loaders share by it"
    )


def _memory() -> list[Line]:
    memory = machine.memory()
    if memory.used is None:
        return [_line("memory", "note", "this cgroup's memory cannot be read")]
    used = f"{memory.used / 2**30:,.1f} GiB used"
    if memory.limit is None:
        return [_line("memory", "ok", f"{used}, no limit of its own")]
    share = memory.used / memory.limit
    detail = f"{used} of {memory.limit / 2**30:,.1f} GiB"
    events = [
        f"{name} {count}" for name, count in (("high", memory.high_events), ("oom_kill", memory.oom_kills)) if count
    ]
    if events:
        detail += f"; since the container started: {', '.join(events)}"
    verdict = "note" if share > 0.9 or events else "ok"
    return [_line("memory", verdict, detail, "runbooks/host-oom.md, runbooks/memory-throttled.md")]


def _cpus() -> Line:
    count = len(os.sched_getaffinity(0))
    return _line("CPUs", "ok", f"{count}: {process.cpuset()} (drawn anew at each start unless pinned)")


def _launcher() -> Line:
    if launchers.tmux_program():
        return _line("tmux", "ok", launchers.tmux_program() or "")
    return _line(
        "tmux", "note", "not installed: runs start with nohup, `fab attach` has nothing to show", "install tmux"
    )


def smoke(request: DoctorRequest, *, on_gpus: bool, python: str = sys.executable) -> list[Line]:
    """Import torch and compute on every card, in a process of its own."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", SMOKE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SMOKE_S,
            env=trainer_cli.environment({}),
            cwd="/",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [_line("smoke test", "bad", f"did not end within {SMOKE_S:.0f} s", "runbooks/gpu-lost.md")]
    marked = [line for line in done.stdout.splitlines() if line.startswith("@")]
    if not marked:
        said = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
        return [_line("smoke test", "bad", said[0], "runbooks/environment-unfit.md")]
    return read_smoke(json.loads(marked[-1][1:]), request, on_gpus=on_gpus)


def read_smoke(found: dict[str, object], request: DoctorRequest, *, on_gpus: bool) -> list[Line]:
    """The lines for what the smoke test has found."""
    if "error" in found:
        return [_line("torch", "bad", str(found["error"]), "`fab provision`; runbooks/environment-unfit.md")]
    lines = [_line("torch", "ok", f"{found['torch']} imports, CUDA {found['cuda'] or 'not built in'}")]
    if not on_gpus:
        return lines
    bad = found.get("bad")
    wanted = request.gpu_count or 1
    if isinstance(bad, list) and bad:
        lines.append(
            _line("CUDA", "bad", "; ".join(map(str, bad)), "runbooks/gpu-lost.md, runbooks/driver-mismatch.md")
        )
    elif found.get("cards") != wanted and request.gpu_count:
        lines.append(
            _line("CUDA", "bad", f"torch sees {found.get('cards')} of {wanted} cards", "runbooks/uvm-missing.md")
        )
    elif not found.get("cards"):
        lines.append(_line("CUDA", "bad", "torch sees no card", "runbooks/uvm-missing.md"))
    else:
        lines.append(_line("CUDA", "ok", f"a small matmul is right on each of {found.get('cards')} cards"))
    missing = [str(found.get(name)) for name in (RECURRENCE, CONVOLUTION) if found.get(name) is not True]
    if not missing:
        lines.append(_line("fast kernels", "ok", "flash-linear-attention and causal-conv1d import, so they are used"))
    else:
        runs = found.get(RECURRENCE) is True or request.slow_kernels_allowed
        detail = "; ".join(missing)
        lines.append(_line("fast kernels", "note" if runs else "bad", detail, "runbooks/missing-fast-kernels.md"))
    return lines


def _left_behind(layout: Layout) -> list[Line]:
    partial = [path.name for path in layout.releases.glob("*.partial")] if layout.releases.is_dir() else []
    if not partial:
        return []
    return [_line("releases", "note", f"left by a cut deploy: {', '.join(partial)}", "`fab deploy` sweeps them")]
