"""From evidence to a cause: pure, and never raising, whatever bytes the evidence holds.

Three rules decide between several matches:
1. a cause beats what it explains: an out-of-memory error inside the dense attention path is a compile problem;
2. then the more telling signature wins;
3. then the earlier line: the first error is the cause, later ones are its echo.

A signature that ends a process counts only if the process did end: an autotuner that survives an out-of-memory
error, or a download that is retried, is no incident.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from dflash_ops.incidents.catalogue import CATALOGUE
from dflash_ops.incidents.evidence import Evidence, Line, Source
from dflash_ops.incidents.signature import Incident, Signature

_STEP = re.compile(r"\bstep[ =:]+\d+\b.*\bloss\b", re.IGNORECASE)
_SURVIVED_STEPS = 3
"""Log lines of finished steps after an error that prove the process outlived it. One or two may be in flight."""
_LINE_LIMIT = 4000
"""Characters of one line that are searched: a log may hold a megabyte on one line."""
_PROOF_LIMIT = 6


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The best match, the lines that prove it, and the other incidents that fit less well."""

    incident: Incident
    proof: tuple[Line, ...]
    others: tuple[Incident, ...] = ()


@dataclass(frozen=True, slots=True)
class NoMatch:
    """Nothing in the catalogue fits; the newest evidence, for a person to read."""

    last_lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class _Match:
    incident: Incident
    weight: int
    proof: tuple[Line, ...]

    @property
    def rank(self) -> tuple[int, int]:
        return (-self.weight, self.proof[0].number)


def diagnose(evidence: Evidence, catalogue: Iterable[Incident] = CATALOGUE) -> Diagnosis | NoMatch:
    """The incident that explains the evidence best, or NoMatch."""
    ended_well = _ended_well(evidence)
    lines = {source: evidence.lines(source) for source in Source}
    searched = {source: [line.text[:_LINE_LIMIT] for line in found] for source, found in lines.items()}
    matches = [
        match
        for incident in catalogue
        if (match := _match(incident, lines, searched, ended_well=ended_well)) is not None
    ]
    explained = {name for match in matches for name in match.incident.explains}
    ranked = sorted(matches, key=lambda match: (match.incident.name in explained, *match.rank))
    if not ranked:
        return NoMatch(_last_lines(evidence))
    return Diagnosis(ranked[0].incident, ranked[0].proof, tuple(match.incident for match in ranked[1:]))


def _match(
    incident: Incident, lines: dict[Source, list[Line]], searched: dict[Source, list[str]], *, ended_well: bool
) -> _Match | None:
    best: _Match | None = None
    for signature in incident.signatures:
        proof = _proof(signature, lines[signature.source], searched[signature.source])
        if not proof or (incident.fatal and signature.source is Source.LOG and (ended_well or _survived(proof, lines))):
            continue
        match = _Match(incident, signature.weight, proof)
        if best is None or match.rank < best.rank:
            best = match
    return best


def _proof(signature: Signature, lines: list[Line], searched: list[str]) -> tuple[Line, ...]:
    if signature.unless is not None and any(signature.unless.search(text) for text in searched):
        return ()
    found = [line for line, text in zip(lines, searched, strict=True) if signature.pattern.search(text)]
    if not found:
        return ()
    if signature.also is not None:
        more = [line for line, text in zip(lines, searched, strict=True) if signature.also.search(text)]
        if not more:
            return ()
        found = sorted({*found[:_PROOF_LIMIT], *more[:_PROOF_LIMIT]}, key=lambda line: line.number)
    return tuple(found[:_PROOF_LIMIT])


def _survived(proof: tuple[Line, ...], lines: dict[Source, list[Line]]) -> bool:
    last = proof[-1].number
    later = sum(1 for line in lines[Source.LOG] if line.number > last and _STEP.search(line.text[:_LINE_LIMIT]))
    return later >= _SURVIVED_STEPS


def _ended_well(evidence: Evidence) -> bool:
    """Did the supervisor record exit code 0? A missing or broken record says nothing, so: no."""
    try:
        record = json.loads(evidence.text(Source.EXIT))
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and record.get("code") == 0 and not record.get("signal")


def _last_lines(evidence: Evidence, count: int = 5) -> tuple[Line, ...]:
    newest: list[Line] = []
    for source in (Source.FAILURE, Source.FACTS, Source.EXIT, Source.LOG):
        newest.extend(evidence.lines(source)[-count:])
    return tuple(newest)
