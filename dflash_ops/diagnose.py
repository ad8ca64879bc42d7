"""`fab diagnose` from the operator's side: gather the evidence, name the incident, show the proof."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dflash_ops.agent.evidence import EvidenceAnswer, EvidenceRequest
from dflash_ops.agent.gpu_facts import GpuFacts
from dflash_ops.agent.messages import Probed, ProbeRequest
from dflash_ops.agent.runs import RunStatus
from dflash_ops.connect import connect_host
from dflash_ops.errors import OpsError, UsageError
from dflash_ops.incidents import Diagnosis, Evidence, Excerpt, Line, NoMatch, Source, diagnose
from dflash_ops.remote import Remote
from dflash_ops.scrub import scrub
from dflash_ops.settings import Target

DEADLINE_S = 90.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found out about one target. `run` is None where there is none or the target could not be asked."""

    target: str
    run: RunStatus | None
    evidence: Evidence
    verdict: Diagnosis | NoMatch


def find(target: Target, remote: Remote, run_id: str) -> Finding:
    """Ask the target; a target that cannot be asked is evidence too. A wrong run id is the operator's error."""
    try:
        return ask(target, remote, run_id)
    except UsageError:
        raise
    except OpsError as error:
        evidence = Evidence.of(failure=failure_text(error))
        return Finding(target.name, None, evidence, diagnose(evidence))


def ask(target: Target, remote: Remote, run_id: str) -> Finding:
    """Ask the target; raises where it cannot be asked."""
    request = EvidenceRequest(run_id, target.gpus.count if target.gpus else None)
    answer = remote.call("evidence", request, EvidenceAnswer, deadline=DEADLINE_S)
    excerpts = [*answer.evidence().excerpts, *_host_kernel_log(remote)]
    evidence = Evidence(tuple(excerpts))
    return Finding(target.name, answer.run, evidence, diagnose(evidence))


def _host_kernel_log(remote: Remote) -> list[Excerpt]:
    """Driver faults that the machine below the container has logged; a container cannot read them itself."""
    host = connect_host(remote)
    if host is None:
        return []
    try:
        facts = host.call("probe-host", ProbeRequest(samples=1), Probed, deadline=DEADLINE_S).facts
        lines = GpuFacts.from_json(facts).kernel_log
    except OpsError:
        return []  # the container has answered: what the host could add is not worth failing for
    return [Excerpt(Source.KERNEL, "\n".join(lines))] if lines else []


def replay(target: str, bundle: str) -> Finding:
    """The same from evidence that was saved before."""
    evidence = Evidence.from_bundle(bundle)
    return Finding(target, None, evidence, diagnose(evidence))


def failure_text(error: OpsError) -> str:
    """What this tool itself has met, as evidence: the error's class, then its lines."""
    return "\n".join([f"kind: {type(error).__name__}", *error.lines()])


def describe(finding: Finding, fab: str) -> list[str]:
    """For people. `fab` is how this target is named on a command line."""
    run = finding.run
    lines = [f"run       {run.run_id}: {run.state} ({run.detail})"] if run else []
    if isinstance(finding.verdict, NoMatch):
        fine = run is not None and (run.state in ("finished", "finishing") or run.live) and run.state != "stalled"
        lines.append("incident  none" if fine else "incident  none that is known; this is the last evidence")
        return [*lines, *(f"last      {text}" for text in _texts(finding.verdict.last_lines))]
    incident = finding.verdict.incident
    lines += [f"incident  {incident.name}", f"cause     {incident.cause}"]
    lines += [f"proof     {text}" for text in _texts(finding.verdict.proof)]
    lines += [f"runbook   runbooks/{incident.runbook}.md", f"next      {next_command(finding, fab)}"]
    if finding.verdict.others:
        lines.append(f"also seen {', '.join(other.name for other in finding.verdict.others)}")
    return lines


def next_command(finding: Finding, fab: str) -> str:
    """The incident's safe next command for this target and run; empty where no incident was found."""
    if isinstance(finding.verdict, NoMatch):
        return ""
    words = finding.verdict.incident.next_command.split()
    words[0] = fab
    return " ".join(finding.run.run_id if word == "RUN" and finding.run else word for word in words)


def as_json(finding: Finding, fab: str) -> dict[str, Any]:
    """For programs."""
    body: dict[str, Any] = {
        "target": finding.target,
        "run": finding.run.run_id if finding.run else None,
        "state": finding.run.state if finding.run else None,
        "detail": scrub(finding.run.detail) if finding.run else None,
    }
    if isinstance(finding.verdict, NoMatch):
        return body | {"incident": None, "last_lines": _records(finding.verdict.last_lines)}
    incident = finding.verdict.incident
    return body | {
        "incident": incident.name,
        "cause": incident.cause,
        "runbook": f"runbooks/{incident.runbook}.md",
        "next": next_command(finding, fab),
        "retryable": incident.retryable,
        "proof": _records(finding.verdict.proof),
        "others": [other.name for other in finding.verdict.others],
    }


def _texts(lines: Iterable[Line]) -> list[str]:
    return [scrub(str(line))[:400] for line in lines]


def _records(lines: Iterable[Line]) -> list[dict[str, Any]]:
    return [{"source": str(line.source), "line": line.number, "text": scrub(line.text)} for line in lines]
