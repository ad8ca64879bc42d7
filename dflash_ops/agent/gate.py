"""The gate: is it known to be safe to start? Facts from here, policy from `preflight`; unknown is never idle."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
from dataclasses import dataclass, field
from typing import Any

from dflash_ops import preflight
from dflash_ops.agent import gpus, process
from dflash_ops.agent.gpu_facts import GpuFacts
from dflash_ops.agent.layout import Layout
from dflash_ops.errors import EnvironmentUnfit, GateRefused
from dflash_ops.preflight import Expected, Status, Verdict

NEEDED = ("torch", "transformers", "safetensors", "numpy")
NEEDED_WITH_GPUS = ("triton", "flash-linear-attention")
REPORTED = (*NEEDED, *NEEDED_WITH_GPUS, "causal-conv1d", "tensorboard", "datasets")
MIN_FREE_INODES = 10_000
SLOW_KERNELS_ALLOWED = "target.allow_slow_kernels"


@dataclass(frozen=True, slots=True)
class GateRequest:
    """What hosts.yaml says about this target's GPUs and disk, and what its host has seen."""

    where: str = "machine"
    gpu_count: int | None = None
    memory_mib: float = 64.0
    utilization: float = 5.0
    samples: int = 3
    min_free_gib: int = 1
    slow_kernels_allowed: bool = False
    host_facts: dict[str, Any] | None = None
    """`GpuFacts` as JSON, taken just now on the Proxmox host; None where there is none."""


@dataclass(frozen=True, slots=True)
class Check:
    """One question of the gate, answered. `kind` is the error it would raise."""

    name: str
    passed: bool
    detail: str
    kind: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class GateReport:
    """All checks, in the order in which they would refuse."""

    checks: tuple[Check, ...]
    gpus: tuple[str, ...]
    """Names of the GPUs to train on; empty: the CPU."""
    versions: dict[str, str]
    notes: tuple[str, ...] = field(default=())

    @property
    def open(self) -> bool:
        return all(check.passed for check in self.checks)


def inspect(layout: Layout, request: GateRequest) -> GateReport:
    """Ask everything; raises nothing. Takes several seconds where there are GPUs: idleness is sampled."""
    facts = gpus.probe(request.where, samples=request.samples)
    verdict = judge(facts, request)
    on_gpus = verdict.status is not Status.NO_GPU
    versions = installed_versions()
    checks = (
        _no_trainer(layout),
        _packages(versions, on_gpus=on_gpus, slow_allowed=request.slow_kernels_allowed),
        _disk(layout, request.min_free_gib),
        _gpus_idle(verdict),
    )
    names = tuple(f"{card.name} ({card.uuid})" for card in facts.cards) if on_gpus else ()
    return GateReport(checks, names, versions, verdict.notes)


def judge(facts: GpuFacts, request: GateRequest) -> Verdict:
    """The GPU verdict alone, as `fab gpus` shows it."""
    expected = Expected(
        count=request.gpu_count,
        memory_mib=request.memory_mib,
        utilization=request.utilization,
        samples=request.samples,
    )
    host = GpuFacts.from_json(request.host_facts) if request.host_facts is not None else None
    return preflight.judge(expected, facts, host)


def require_open(report: GateReport) -> None:
    """Raise the error of the first check that did not pass."""
    for check in report.checks:
        if not check.passed:
            kind = EnvironmentUnfit if check.kind == EnvironmentUnfit.__name__ else GateRefused
            raise kind(f"{check.name}: refused", why=check.detail, hint=check.hint)


def installed_versions() -> dict[str, str]:
    """Versions of what the trainer needs, from package metadata: nothing is imported."""
    versions = {"python": platform.python_version()}
    for name in REPORTED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _no_trainer(layout: Layout) -> Check:
    """A trainer that writes under this workspace although the lock is free: its supervisor's lock was bypassed."""
    runs = f"{layout.runs}/"
    for pid, argv in process.command_lines().items():
        is_trainer = ("-m", "trainer") in itertools.pairwise(argv)
        if is_trainer and any(word.startswith(runs) for word in argv):
            return Check(
                "trainer",
                passed=False,
                detail=f"a trainer runs as pid {pid}: {' '.join(argv)[:200]}",
                kind=GateRefused.__name__,
                hint="`fab stop`, or end that process on the target",
            )
    return Check("trainer", passed=True, detail="none runs")


def _packages(versions: dict[str, str], *, on_gpus: bool, slow_allowed: bool) -> Check:
    wanted = NEEDED + (NEEDED_WITH_GPUS if on_gpus and not slow_allowed else ())
    missing = [name for name in wanted if name not in versions]
    detail = ", ".join(f"{name} {versions[name]}" for name in ("python", *wanted) if name in versions)
    if not missing:
        return Check("packages", passed=True, detail=detail)
    hint = "install them into the Python that hosts.yaml names (`python:`)"
    if set(missing) <= set(NEEDED_WITH_GPUS):
        hint += f"; `--set {SLOW_KERNELS_ALLOWED}=true` trains without them, many times slower"
    return Check(
        "packages",
        passed=False,
        detail=f"missing: {', '.join(missing)}; found: {detail}",
        kind=EnvironmentUnfit.__name__,
        hint=hint,
    )


def _disk(layout: Layout, min_free_gib: int) -> Check:
    space = os.statvfs(layout.workspace)
    free = space.f_bavail * space.f_frsize
    detail = f"{free / 2**30:.1f} GiB and {space.f_favail} inodes free under {layout.workspace}"
    # A file system without a fixed inode table reports 0 of 0.
    if free < min_free_gib << 30 or (space.f_files and space.f_favail < MIN_FREE_INODES):
        return Check(
            "disk",
            passed=False,
            detail=f"{detail}; {min_free_gib} GiB and {MIN_FREE_INODES} inodes are asked for",
            kind=EnvironmentUnfit.__name__,
            hint="remove old runs or checkpoints there, or lower min_free_gib in hosts.yaml",
        )
    return Check("disk", passed=True, detail=detail)


def _gpus_idle(verdict: Verdict) -> Check:
    passed = verdict.status in (Status.IDLE, Status.NO_GPU)
    return Check(
        "GPUs",
        passed=passed,
        detail="; ".join(verdict.lines),
        kind="" if passed else GateRefused.__name__,
        hint="" if passed else "`fab gpus` shows each card; wait until they are free",
    )
