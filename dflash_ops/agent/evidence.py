"""What this target can say about a run in trouble, as texts for the diagnosis. Reads; changes nothing."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.agent import gpus, machine, nvidia_smi, process, records, runs
from dflash_ops.agent.gpu_facts import OK
from dflash_ops.agent.layout import Layout
from dflash_ops.agent.runs import ExitRecord, RunStatus
from dflash_ops.incidents.evidence import Evidence, Excerpt, Source

LOG_HEAD = 1 << 14
"""The header of a log says what the run is."""
LOG_TAIL = 1 << 19
METRICS_TAIL = 1 << 15
THROTTLE_SAMPLE_S = 1.0
RECENT_S = 120.0
DRIVER_LINE = re.compile(r"NVRM|Xid|fallen off", re.IGNORECASE)
OOM_LINE = re.compile(r"(?:Killed process |oom-kill:.*\bpid=)(\d+)")


@dataclass(frozen=True, slots=True)
class EvidenceRequest:
    """`run_id` empty: the newest run. `gpu_count`: how many cards hosts.yaml expects."""

    run_id: str = ""
    gpu_count: int | None = None


@dataclass(frozen=True, slots=True)
class ExcerptRecord:
    source: str
    text: str
    first_line: int = 1


@dataclass(frozen=True, slots=True)
class EvidenceAnswer:
    """`run` is None where the target has no run yet: the facts of the machine remain."""

    run: RunStatus | None
    excerpts: tuple[ExcerptRecord, ...]

    def evidence(self) -> Evidence:
        known = {str(source): source for source in Source}
        return Evidence(
            tuple(Excerpt(known[e.source], e.text, e.first_line) for e in self.excerpts if e.source in known)
        )


def collect(layout: Layout, request: EvidenceRequest) -> EvidenceAnswer:
    """Everything about one run and the machine it runs on."""
    status = runs.find(layout, request.run_id)
    texts: list[ExcerptRecord] = []
    if status is not None:
        texts += of_run(Path(status.directory))
    texts.append(ExcerptRecord(Source.FACTS, "\n".join(_facts(layout, status, request))))
    record = runs.read_run(Path(status.directory)) if status is not None else None
    end = runs.read_exit(Path(status.directory)) if status is not None else None
    pids = {identity.pid for identity in (record.trainer, record.supervisor) if identity} if record else set()
    texts += _machine_texts(record.created_at if record else 0.0, pids, end.oom_kills if end else None)
    return EvidenceAnswer(status, tuple(texts))


def of_machine(end: ExitRecord, pid: int) -> list[ExcerptRecord]:
    """What the supervisor adds right after trainer `pid` crashed: the ending, the cards, the kernel's last words."""
    said = ExcerptRecord(Source.EXIT, json.dumps(records.dump(end)))
    return [said, *_machine_texts(end.ended_at - RECENT_S, {pid}, end.oom_kills)]


def _machine_texts(since: float, pids: set[int], oom_kills: int | None) -> list[ExcerptRecord]:
    texts = []
    if (smi := gpus.find_program()) is not None:
        try:
            said = nvidia_smi.ask([smi], 10.0)
        except nvidia_smi.Fault as fault:
            said = str(fault)
        texts.append(ExcerptRecord(Source.GPU, said))
    kernel = machine.said_by(["dmesg"], 5.0, keep=1 << 20) or ""
    told = [line for line in kernel.splitlines() if _concerns(line, pids, oom_kills) and _since(line, since)]
    if told:
        texts.append(ExcerptRecord(Source.KERNEL, "\n".join(told[-50:])))
    return texts


def _concerns(line: str, pids: set[int], oom_kills: int | None) -> bool:
    """Is a kernel line about this run? A card's fault is everybody's; an OOM kill is only that of its own processes.

    The kernel's log is the whole machine's: other guests run out of memory too.
    """
    if DRIVER_LINE.search(line):
        return True
    killed = OOM_LINE.search(line)
    return killed is not None and (bool(oom_kills) or int(killed[1]) in pids)


def of_run(directory: Path) -> list[ExcerptRecord]:
    """The files of one run directory; the log is the newest attempt's."""
    record = runs.read_run(directory)
    log = Path(record.log).name if record is not None else "train.log"
    found = _tail(directory / log, Source.LOG, LOG_TAIL, head=LOG_HEAD)
    found += _tail(directory / "metrics.jsonl", Source.METRICS, METRICS_TAIL)
    for name, source in (("exit.json", Source.EXIT), ("run.json", Source.RUN)):
        found += _tail(directory / name, source, METRICS_TAIL)
    return found


def _tail(path: Path, source: Source, size: int, head: int = 0) -> list[ExcerptRecord]:
    """The last whole lines within `size` bytes, numbered as in the whole file; with `head`, the first ones too."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            if end <= size + head:
                file.seek(0)
                return [ExcerptRecord(source, file.read().decode("utf-8", "replace"))]
            file.seek(0)
            first = file.read(head).rpartition(b"\n")[0]
            file.seek(end - size)
            _, _, last = file.read().partition(b"\n")
            number = 1 + _newlines(path, end - len(last))
    except OSError:
        return []
    found = [ExcerptRecord(source, first.decode("utf-8", "replace"))] if first else []
    return [*found, ExcerptRecord(source, last.decode("utf-8", "replace"), number)]


def _newlines(path: Path, before: int) -> int:
    count = 0
    with path.open("rb") as file:
        while before > 0 and (piece := file.read(min(1 << 20, before))):
            count += piece.count(b"\n")
            before -= len(piece)
    return count


def _facts(layout: Layout, status: RunStatus | None, request: EvidenceRequest) -> list[str]:
    facts = [f"state: {status.state} ({status.detail})"] if status else []
    facts += _memory_facts(live=status is not None and status.live)
    for path in dict.fromkeys((layout.workspace, layout.root)):
        disk = machine.disk(path)
        if disk is not None:
            word = "full" if disk.full else "ok"
            facts.append(
                f"disk: {word}, {disk.free_bytes >> 20} MiB and {disk.free_inodes} inodes free under {disk.path}"
            )
    partial = [path.name for path in layout.releases.glob("*.partial")] if layout.releases.is_dir() else []
    facts += [f"release: {name} was left by a cut deploy" for name in partial]
    facts += _gpu_facts(request)
    if status is not None and status.launcher == "tmux" and not layout.tmux_socket.exists():
        socket = str(layout.tmux_socket)
        if any("tmux" in words[0] and socket in " ".join(words) for words in process.command_lines().values()):
            facts.append("tmux: server alive, socket missing")
    return facts


def _memory_facts(*, live: bool) -> list[str]:
    before = machine.memory()
    facts = []
    if before.used is not None:
        limit = f"{before.limit / 2**30:.1f}" if before.limit else "no limit"
        facts.append(f"memory: {before.used / 2**30:.1f} GiB used of {limit}")
    if before.high_events and live:
        time.sleep(THROTTLE_SAMPLE_S)
        risen = (machine.memory().high_events or 0) - before.high_events
        if risen > 0:
            facts.append(f"memory.events: high rose by {risen} in {THROTTLE_SAMPLE_S:.0f} s")
    return facts


def _gpu_facts(request: EvidenceRequest) -> list[str]:
    facts = []
    if list(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/nvidia-uvm").exists():
        facts.append("device: /dev/nvidia-uvm missing")
    if request.gpu_count:
        seen = gpus.probe("container", samples=1)
        if seen.state == OK and len(seen.cards) < request.gpu_count:
            facts.append(f"gpus: {len(seen.cards)} of {request.gpu_count} present")
    return facts


def _since(line: str, moment: float) -> bool:
    """Was this kernel line written after `moment`? A line without a time stamp counts."""
    stamp = re.match(r"\[\s*(\d+\.\d+)\]", line)
    uptime = machine.uptime_s()
    if stamp is None or uptime is None:
        return True
    return time.time() - uptime + float(stamp[1]) >= moment - 5.0
