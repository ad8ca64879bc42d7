"""Launching from the operator's side: what the target is told, and how a lost connection is resolved."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_ops.agent.gate import SLOW_KERNELS_ALLOWED, GateReport, GateRequest
from dflash_ops.agent.gpu_facts import FAILED, GpuFacts
from dflash_ops.agent.launch import LaunchRequest, LaunchResult
from dflash_ops.agent.messages import GpuReport, Overview, Probed, ProbeRequest, StatusRequest
from dflash_ops.connect import connect_host
from dflash_ops.errors import (
    AgentFailed,
    DeadlineExceeded,
    EnvironmentUnfit,
    HostUnreachable,
    OpsError,
    RunLost,
    UsageError,
)
from dflash_ops.remote import Remote
from dflash_ops.settings import Target

LAUNCH_DEADLINE_S = 300.0
GATE_DEADLINE_S = 180.0
PROBE_DEADLINE_S = 120.0
STATUS_DEADLINE_S = 60.0
RESOLVE_S = 90.0
"""How long to go on asking what became of a launch whose connection dropped."""


Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The operator's words on the command line."""

    variant: str = ""
    settings: tuple[str, ...] = ()
    """`key=value`, as given to --set."""
    resume: str = ""
    keep_cache: bool = False
    keep_alive: int = 0
    """How many times the supervisor may start a crashed run again."""
    launcher: str = ""


def launch(remote: Remote, target: Target, options: LaunchOptions, who: str, say: Say) -> LaunchResult:
    """Start one run. A connection lost on the way is answered by asking for the nonce, never by a second launch."""
    overrides = target_overrides(target) | parse_settings(options.settings)
    request = LaunchRequest(
        nonce=secrets.token_hex(16),
        who=who,
        variant=options.variant,
        overrides=overrides,
        resume=options.resume,
        keep_cache=options.keep_cache,
        keep_alive=options.keep_alive,
        launcher=_launcher(options.launcher) or target.launcher,
        session=target.session,
        env=dict(target.env),
        legacy_caches=target.legacy_caches,
        gate=gate_request(remote, target, slow_kernels_allowed=overrides.get(SLOW_KERNELS_ALLOWED) == "true"),
    )
    try:
        return remote.call("launch", request, LaunchResult, deadline=LAUNCH_DEADLINE_S, on_progress=say)
    except (HostUnreachable, DeadlineExceeded, AgentFailed) as error:
        if error.reported:
            raise
        return _resolve(remote, request, error, say)


def preflight(remote: Remote, target: Target) -> GateReport:
    """The gate's checks alone; nothing is started."""
    allowed = target_overrides(target).get(SLOW_KERNELS_ALLOWED) == "true"
    request = gate_request(remote, target, slow_kernels_allowed=allowed)
    return remote.call("preflight", request, GateReport, deadline=GATE_DEADLINE_S)


def gpus(remote: Remote, target: Target) -> GpuReport:
    """What the cards show, and the verdict."""
    return remote.call("gpus", gate_request(remote, target), GpuReport, deadline=GATE_DEADLINE_S)


def gate_request(remote: Remote, target: Target, *, slow_kernels_allowed: bool = False) -> GateRequest:
    """What hosts.yaml says about the GPUs, with the host's own view where there is a host."""
    return GateRequest(
        where="machine" if target.via == "local" else "container",
        gpu_count=target.gpus.count if target.gpus else None,
        memory_mib=float(target.idle.memory_mib),
        utilization=float(target.idle.utilization),
        samples=target.idle.samples,
        min_free_gib=target.min_free_gib,
        slow_kernels_allowed=slow_kernels_allowed,
        host_facts=host_facts(remote, target),
    )


def host_facts(remote: Remote, target: Target) -> dict[str, Any] | None:
    """What the machine below the target sees of the GPUs; None where there is none, or where no GPU is asked for.

    A host whose agent cannot run gives facts that say so: they can never be judged idle.
    """
    host = connect_host(remote)
    if host is None or (target.gpus is not None and target.gpus.count == 0):
        return None
    try:
        request = ProbeRequest(samples=target.idle.samples)
        return host.call("probe-host", request, Probed, deadline=PROBE_DEADLINE_S).facts
    except (AgentFailed, EnvironmentUnfit) as error:
        problem = f"the probe could not run: {error.what}" + (f" ({error.why})" if error.why else "")
        return GpuFacts(where="host", state=FAILED, problem=problem).to_json()


def target_overrides(target: Target) -> dict[str, str]:
    """The trainer settings that hosts.yaml implies: devices by role, then `train:`."""
    overrides: dict[str, str] = {}
    if target.gpus is not None and target.gpus.roles is not None:
        for role in ("target", "drafter", "verifier"):
            overrides[f"topology.{role}"] = json.dumps([f"cuda:{index}" for index in getattr(target.gpus.roles, role)])
    return overrides | {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in target.train.items()
    }


def parse_settings(settings: tuple[str, ...]) -> dict[str, str]:
    """`key=value` words as a mapping; UsageError on anything else."""
    parsed: dict[str, str] = {}
    for word in settings:
        key, equals, value = word.partition("=")
        if not equals or not key or any(ord(char) < 32 for char in word) or key.startswith("-"):
            raise UsageError(f"--set {word!r} is not key=value", hint="for example: --set run.max_steps=100")
        parsed[key] = value
    return parsed


def _launcher(word: str) -> str:
    if word:
        launchers_known = ("auto", "tmux", "nohup", "systemd")
        if word not in launchers_known:
            raise UsageError(f"--launcher {word!r}: choose one of {', '.join(launchers_known)}")
    return word


def _resolve(remote: Remote, request: LaunchRequest, error: OpsError, say: Say) -> LaunchResult:
    """Ask what became of the launch until the target answers; raise `error` where nothing was started."""
    say(f"the answer to the launch was lost ({error.what}); asking the target what became of it")
    ends_at = time.monotonic() + RESOLVE_S
    wait = 1.0
    while True:
        try:
            asked = StatusRequest(nonce=request.nonce)
            run = remote.call("status", asked, Overview, deadline=STATUS_DEADLINE_S).run
        except (HostUnreachable, DeadlineExceeded):
            if time.monotonic() > ends_at:
                raise error from None
            time.sleep(wait)
            wait = min(10.0, wait * 2)
            continue
        if run is None:
            raise error
        if run.state == "starting" and run.pid is None and time.monotonic() < ends_at:
            time.sleep(0.5)
            continue
        if run.state in ("lost", "failed"):
            raise RunLost(
                f"run {run.run_id} did not start", why=run.detail, hint="nothing runs; `fab launch` tries again"
            ) from error
        return LaunchResult(
            run_id=run.run_id,
            release=run.release,
            variant=run.variant,
            directory=run.directory,
            log=run.log,
            pid=run.pid or 0,
            launcher=run.launcher,
            session=run.session,
            gpus=(),
            resumed_from=run.overrides.get("run.resume"),
        )
