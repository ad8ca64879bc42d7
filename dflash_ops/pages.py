"""`fab report` from the operator's side: read a run's files and make its page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_ops import console
from dflash_ops import diagnose as diagnosing
from dflash_ops.agent.runs import RunStatus
from dflash_ops.diagnose import Finding
from dflash_ops.errors import UsageError
from dflash_ops.events import Event, parse_events
from dflash_ops.incidents import Diagnosis, Source
from dflash_ops.named_file import require_regular
from dflash_ops.pull import read_whole
from dflash_ops.remote import Remote
from dflash_ops.report import RunPage, render
from dflash_ops.settings import Target

METRICS_LIMIT = 1 << 30
LOG_LINES = 200


@dataclass(frozen=True, slots=True)
class Written:
    """A page on the laptop."""

    run_id: str
    path: Path
    events: int


def write(target: Target, remote: Remote, run_id: str, out: str, fab: str) -> Written:
    """Make the page of a run; `out` empty: report-RUN.html in the working directory."""
    finding = diagnosing.ask(target, remote, run_id)
    if finding.run is None:
        raise UsageError(f"no run to report on {target.name}", hint=f"`{fab} runs` lists them")
    run = finding.run
    events = [
        event
        for name in ("metrics.jsonl", "gpu.jsonl")
        for event in parse_events(read_whole(remote, run.run_id, name, METRICS_LIMIT).decode("utf-8", "replace"))
    ]
    events.sort(key=lambda event: event.time)
    path = require_regular(Path(out or f"report-{run.run_id}.html"))
    try:
        path.write_text(render(page(finding, run, tuple(events), fab)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written", why=error.strerror or str(error)) from None
    return Written(run.run_id, path, len(events))


def page(finding: Finding, run: RunStatus, events: tuple[Event, ...], fab: str) -> RunPage:
    """The page's content from what was read."""
    proof: tuple[str, ...] = ()
    if isinstance(finding.verdict, Diagnosis):
        proof = tuple(diagnosing.describe(finding, fab)[1:])
    log = [line.text for line in finding.evidence.lines(Source.LOG)][-LOG_LINES:]
    return RunPage(
        run_id=run.run_id,
        state=run.state,
        evidence=run.detail,
        facts=_facts(finding.target, run, events),
        events=events,
        proof=proof,
        log_tail="\n".join(log),
    )


def _facts(target: str, run: RunStatus, events: tuple[Event, ...]) -> tuple[tuple[str, str], ...]:
    starts = [event for event in events if event.kind == "start"]
    facts = [
        ("target", target),
        ("variant", run.variant),
        ("release", run.release),
        ("launched", console.moment(run.created_at)),
        ("ended", console.moment(run.ended_at) if run.ended_at else "no"),
        ("attempts", str(max(len(starts), 1))),
        ("launcher", run.launcher),
        ("directory", run.directory),
        ("settings", ", ".join(f"{key}={value}" for key, value in run.overrides.items()) or "none"),
    ]
    if starts:
        said = starts[-1].values
        versions, gpus = said.get("versions"), said.get("gpus")
        if isinstance(versions, dict):
            facts.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
        if isinstance(gpus, list):
            facts.append(("GPUs", ", ".join(map(str, gpus)) or "none: on the CPU"))
        if isinstance(said.get("notes"), list):
            facts += [("note", str(note)) for note in said["notes"]]
        if said.get("resumed_from"):
            facts.append(("resumed from", str(said["resumed_from"])))
    balance = next((event.values.get("text") for event in reversed(events) if event.kind == "balance"), None)
    if balance is not None:
        facts.append(("balance", str(balance)))
    return tuple(facts)
