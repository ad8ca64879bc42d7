"""The agent's verbs: JSON in, the work of one module, JSON out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from dflash_ops.agent import (
    audit,
    board,
    cache,
    doctor,
    evidence,
    files,
    gate,
    gpus,
    launch,
    launchers,
    lock,
    messages,
    records,
    releases,
    runs,
    snapshot,
    stop,
)
from dflash_ops.agent import fetch as fetching
from dflash_ops.agent import follow as following
from dflash_ops.agent import provision as provisioning
from dflash_ops.agent import prune as pruning
from dflash_ops.agent.gate import GateReport, GateRequest
from dflash_ops.agent.launch import LaunchRequest
from dflash_ops.agent.layout import Layout, linked_release
from dflash_ops.agent.lock import Holder
from dflash_ops.agent.manifest import read_manifest
from dflash_ops.agent.releases import Deployed
from dflash_ops.agent.wire import Event, Progress
from dflash_ops.errors import UsageError


@dataclass(frozen=True, slots=True)
class Call:
    """One request, as a verb sees it."""

    layout: Layout
    params: dict[str, Any]
    payload: BinaryIO
    payload_size: int
    emit: Callable[[Event], bool]

    def say(self, text: str) -> None:
        self.emit(Progress(text))


def _select(call: Call) -> Deployed:
    request = records.load(messages.SelectRequest, call.params)
    call.layout.create()
    done = releases.select(call.layout, request.release_id)
    if done.changed:
        audit.append(call.layout, "deploy", request.who, request.release_id)
    return done


def _install(call: Call) -> Deployed:
    request = records.load(messages.InstallRequest, call.params)
    call.layout.create()
    done = releases.install(call.layout, request.manifest, call.payload, call.payload_size, call.say)
    audit.append(call.layout, "deploy", request.who, done.release_id)
    return done


def _rollback(call: Call) -> Deployed:
    request = records.load(messages.SelectRequest, call.params)
    call.layout.create()
    done = releases.rollback(call.layout, request.release_id)
    audit.append(call.layout, "rollback", request.who, done.release_id)
    return done


def _releases(call: Call) -> messages.Releases:
    return messages.Releases(tuple(releases.listing(call.layout)))


def _current(call: Call) -> messages.Current:
    release_id = linked_release(call.layout.current)
    manifest = read_manifest(call.layout.release(release_id)) if release_id else None
    return messages.Current(release_id, manifest)


def _launch(call: Call) -> launch.LaunchResult:
    request = records.load(LaunchRequest, call.params)
    call.layout.create()
    done = launch.launch(call.layout, request, call.say)
    audit.append(call.layout, "launch", request.who, done.run_id)
    return done


def _status(call: Call) -> messages.Overview:
    request = records.load(messages.StatusRequest, call.params)
    if request.nonce:
        directories = runs.directories(call.layout)
        found = [record for path in directories if (record := runs.read_run(path)) and record.nonce == request.nonce]
        run = runs.derive(found[0], call.layout.run(found[0].run_id)) if found else None
    else:
        run = runs.find(call.layout, request.run_id)
    return messages.Overview(run, linked_release(call.layout.current), _holder(call.layout))


def _holder(layout: Layout) -> Holder | None:
    if not layout.lock.exists():
        return None
    descriptor = files.try_lock(layout.lock)
    if descriptor is None:
        return lock.read_holder(layout)
    os.close(descriptor)
    return None


def _runs(call: Call) -> messages.Runs:
    request = records.load(messages.RunsRequest, call.params)
    found = []
    for status in runs.statuses(call.layout):
        found.append(status)
        if len(found) >= request.limit:
            break
    return messages.Runs(tuple(found))


def _follow(call: Call) -> following.FollowEnd:
    return following.follow(call.layout, records.load(following.FollowRequest, call.params), call.emit)


def _stop(call: Call) -> stop.StopResult:
    request = records.load(stop.StopRequest, call.params)
    done = stop.stop(call.layout, request, call.say)
    if done.stopped and done.status is not None:
        audit.append(call.layout, "stop --kill" if request.kill else "stop", request.who, done.status.run_id)
    return done


def _preflight(call: Call) -> GateReport:
    call.layout.create()
    return gate.inspect(call.layout, records.load(GateRequest, call.params))


def _gpus(call: Call) -> messages.GpuReport:
    request = records.load(GateRequest, call.params)
    facts = gpus.probe(request.where, samples=request.samples)
    verdict = gate.judge(facts, request)
    return messages.GpuReport(verdict.status.value, verdict.lines, verdict.notes, facts.to_json())


def _evidence(call: Call) -> evidence.EvidenceAnswer:
    return evidence.collect(call.layout, records.load(evidence.EvidenceRequest, call.params))


def _probe_host(call: Call) -> messages.Probed:
    return messages.Probed(
        gpus.probe("host", samples=records.load(messages.ProbeRequest, call.params).samples).to_json()
    )


def _prune(call: Call) -> pruning.PrunePlan:
    request = records.load(pruning.PruneRequest, call.params)
    done = pruning.prune(call.layout, request, call.say)
    if done.removed:
        audit.append(call.layout, "prune", request.who, f"{done.freed} bytes: {' '.join(done.removed)}")
    return done


def _provision(call: Call) -> provisioning.Provisioned:
    request = records.load(provisioning.ProvisionRequest, call.params)
    call.layout.create()
    done = provisioning.provision(call.layout, request, call.say)
    audit.append(call.layout, "provision", request.who, done.environment)
    return done


def _wheel(call: Call) -> provisioning.WheelAnswer:
    request = records.load(provisioning.WheelRequest, call.params)
    call.layout.create()
    return provisioning.take_wheel(call.layout, request, call.payload, call.payload_size)


def _tensorboard(call: Call) -> board.BoardEnd:
    return board.serve(call.layout, records.load(board.BoardRequest, call.params), call.emit)


def _http(call: Call) -> board.ExchangeEnd:
    return board.exchange(records.load(board.ExchangeRequest, call.params), call.emit)


def _doctor(call: Call) -> doctor.Examined:
    return doctor.container(call.layout, records.load(doctor.DoctorRequest, call.params))


def _doctor_host(call: Call) -> doctor.Examined:
    return doctor.host()


def _watch(call: Call) -> snapshot.WatchEnd:
    return snapshot.watch(call.layout, records.load(snapshot.WatchRequest, call.params), call.emit)


def _files(call: Call) -> fetching.Listing:
    return fetching.listing(call.layout, records.load(fetching.ListRequest, call.params), call.say)


def _fetch(call: Call) -> fetching.FetchEnd:
    return fetching.fetch(call.layout, records.load(fetching.FetchRequest, call.params), call.emit)


def _clear_cache(call: Call) -> messages.Cleared:
    request = records.load(messages.ClearRequest, call.params)
    call.layout.create()
    descriptor = lock.acquire(call.layout, "clear-cache", "", request.who)
    try:
        names = [path.name for path in call.layout.cache.iterdir()]
        lines = cache.clear(call.layout, names, request.legacy_caches)
    finally:
        os.close(descriptor)
    audit.append(call.layout, "clear-cache", request.who, "; ".join(lines))
    return messages.Cleared(tuple(lines))


def _attach(call: Call) -> messages.AttachAnswer:
    request = records.load(messages.AttachRequest, call.params)
    status = runs.find(call.layout, request.run_id) if request.run_id else runs.live_run(call.layout)
    if status is None or not status.live:
        raise UsageError(
            "no run to attach to", hint="`fab runs` lists them; `fab tail-log --no-follow` shows the last log"
        )
    if status.launcher != "tmux":
        raise UsageError(
            f"run {status.run_id} was started with {status.launcher}: there is no terminal to attach to",
            hint="`fab tail-log` follows it",
        )
    return messages.AttachAnswer(status.run_id, launchers.attach_argv(call.layout, status.session))


VERBS: dict[str, Callable[[Call], Any]] = {
    "select": _select,
    "install": _install,
    "rollback": _rollback,
    "releases": _releases,
    "current": _current,
    "launch": _launch,
    "status": _status,
    "runs": _runs,
    "follow": _follow,
    "stop": _stop,
    "preflight": _preflight,
    "gpus": _gpus,
    "evidence": _evidence,
    "probe-host": _probe_host,
    "prune": _prune,
    "tensorboard": _tensorboard,
    "http": _http,
    "provision": _provision,
    "wheel": _wheel,
    "doctor": _doctor,
    "doctor-host": _doctor_host,
    "watch": _watch,
    "files": _files,
    "fetch": _fetch,
    "clear-cache": _clear_cache,
    "attach": _attach,
}
