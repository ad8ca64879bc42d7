"""Is it safe to start on these GPUs? Pure policy: facts in, verdict out. Stdlib only: ships inside the agent too.

Three rules decide:

- A use that is proved (a process, memory above the limit, utilization) makes a card busy, from whichever view.
- Idle must be shown, never assumed: every sample of every expected card, in every view there is, below its limits,
  with an empty process table.
- Everything else is unknown, and unknown is treated as busy by the gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from dflash_ops.agent.gpu_facts import (
    NO_NVIDIA_SMI,
    OK,
    TABLE_HIDDEN,
    TABLE_UNREAD,
    Card,
    GpuFacts,
    GpuProcess,
)

# Services that watch or serve the driver and keep device files open on an idle machine.
# Names as in /proc/PID/comm: at most 15 characters.
DRIVER_SERVICES = frozenset({"nvidia-persiste", "nv-fabricmanage", "nv-hostengine", "dcgm-exporter", "nvidia-smi"})
UNCLEAR = frozenset({TABLE_HIDDEN, TABLE_UNREAD})


class Status(StrEnum):
    """Ordered from harmless to worst; `no_gpu` means that none is expected and none is there."""

    NO_GPU = "no_gpu"
    IDLE = "idle"
    UNKNOWN = "unknown"
    BUSY = "busy"


@dataclass(frozen=True, slots=True)
class Expected:
    """What hosts.yaml says: how many cards, which ones, and what still counts as idle.

    `count` None: as many as there are, none included. `count` 0: train on the CPU, whatever is there.
    """

    count: int | None = None
    uuids: tuple[str, ...] = ()
    memory_mib: float = 64.0
    utilization: float = 5.0
    samples: int = 3


@dataclass(frozen=True, slots=True)
class CardVerdict:
    """One card's status with the reasons for it, each a sentence."""

    uuid: str
    index: int | None
    status: Status
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement: `lines` say why, most important first; `notes` are worth knowing and decide nothing."""

    status: Status
    lines: tuple[str, ...]
    cards: tuple[CardVerdict, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(expected: Expected, container: GpuFacts, host: GpuFacts | None = None) -> Verdict:
    """The verdict on the cards that the container has.

    `container` is the view from where the trainer will run. `host` is the view from the machine below it, None where
    there is no such machine (a bare machine, or only a container that can be reached).
    """
    notes = _notes(expected, container, host)
    if expected.count == 0:
        return Verdict(Status.NO_GPU, ("no GPU is asked for: the trainer runs on the CPU",), notes=notes)
    if container.state == NO_NVIDIA_SMI and not container.device_files and not (expected.count or expected.uuids):
        return Verdict(Status.NO_GPU, (f"no GPU in the {container.where}: the trainer runs on the CPU",), notes=notes)

    # A host without nvidia-smi still shows who holds the device files, but gives no second opinion on the readings.
    views = [container] if host is None or host.state == NO_NVIDIA_SMI else [container, host]
    everyone = [container] if host is None else [container, host]
    ours = [card for card in container.cards if not expected.uuids or card.uuid in expected.uuids]
    cards = tuple(_judge_card(card, expected, views, everyone) for card in ours)

    busy = [f"{_label(card)}: {reason}" for card in cards if card.status is Status.BUSY for reason in card.reasons]
    busy += [f"a card not known by UUID: {sentence}" for facts in everyone for sentence in _strays(facts, container)]
    unknown = [_unread(facts, host) for facts in views if facts.state != OK]
    unknown += _missing(expected, container, host)
    unknown += [_unclear_table(facts) for facts in views if facts.state == OK and facts.table in UNCLEAR]
    unknown += [f"{_label(card)}: {why}" for card in cards if card.status is Status.UNKNOWN for why in card.reasons]
    if busy:
        return Verdict(Status.BUSY, (*busy, *unknown), cards, notes)
    if unknown or not cards:
        return Verdict(Status.UNKNOWN, tuple(unknown) or ("no card was judged",), cards, notes)
    return Verdict(Status.IDLE, (_idle_sentence(expected, cards, views),), cards, notes)


def _judge_card(card: Card, expected: Expected, views: Sequence[GpuFacts], everyone: Sequence[GpuFacts]) -> CardVerdict:
    busy: list[str] = []
    unknown: list[str] = []
    for facts in everyone:
        busy += [_process_sentence(p, facts.where) for p in facts.processes if p.gpu_uuid == card.uuid and _counts(p)]
    for facts in views:
        if facts.state != OK:
            continue
        here = [other for other in facts.cards if other.uuid == card.uuid]
        if not here:
            unknown.append(f"the {facts.where} does not list this card")
        for view in here:
            over, unread = _judge_samples(view, expected, facts.where)
            busy += over
            unknown += unread
    if busy:
        return CardVerdict(card.uuid, card.index, Status.BUSY, tuple(dict.fromkeys(busy)))
    if unknown:
        return CardVerdict(card.uuid, card.index, Status.UNKNOWN, tuple(dict.fromkeys(unknown)))
    return CardVerdict(card.uuid, card.index, Status.IDLE, ("no process, memory and utilization below their limits",))


def _judge_samples(card: Card, expected: Expected, where: str) -> tuple[list[str], list[str]]:
    """(why busy, why unknown) by the numbers of one view."""
    busy: list[str] = []
    unknown: list[str] = []
    memory = [sample.memory_mib for sample in card.samples if sample.memory_mib is not None]
    work = [sample.utilization for sample in card.samples if sample.utilization is not None]
    if memory and max(memory) > expected.memory_mib:
        busy.append(f"{max(memory):.0f} MiB in use ({where}; idle is up to {expected.memory_mib:g} MiB)")
    if work and max(work) > expected.utilization:
        busy.append(f"utilization {max(work):.0f} % ({where}; idle is up to {expected.utilization:g} %)")
    if card.mig:
        unknown.append(f"MIG is on ({where}): figures of a whole card are not given; switch it off: nvidia-smi -mig 0")
    elif card.unreadable:
        unknown.append(f"nvidia-smi gives no number ({where}): {', '.join(card.unreadable)}")
    elif len(memory) < len(card.samples) or len(work) < len(card.samples):
        unknown.append(f"a reading is missing ({where})")
    wanted = max(1, expected.samples)
    if len(card.samples) < wanted:
        unknown.append(f"seen in {len(card.samples)} of {wanted} samples ({where}): the card comes and goes")
    if card.compute_mode == "Prohibited":
        unknown.append(f"compute mode is Prohibited ({where}): no program may use this card")
    return busy, unknown


def _missing(expected: Expected, container: GpuFacts, host: GpuFacts | None) -> list[str]:
    """Expected cards that are not there: a card can vanish without any message."""
    found = {card.uuid for card in container.cards}
    below = {card.uuid for card in host.cards} if host is not None else set()
    lines: list[str] = []
    for uuid in expected.uuids:
        if uuid not in found:
            place = "the host still lists it" if uuid in below else "the host does not list it either"
            lines.append(f"card {uuid} is missing from the {container.where}" + (f"; {place}" if host else ""))
    if expected.count is not None and len(found) < expected.count:
        lines.append(f"{len(found)} of {expected.count} expected cards are there ({container.where})")
    for facts in (container, host):
        # A container sees the whole PCI bus through /sys, yet is given some of the cards only.
        if facts is None or facts.where == "container" or facts.state != OK:
            continue
        listed, bus = len(facts.cards), facts.pci_cards
        if bus is not None and bus > listed:
            lines.append(f"the PCI bus has {bus} cards, nvidia-smi lists {listed} ({facts.where})")
    return lines


def _unread(facts: GpuFacts, host: GpuFacts | None) -> str:
    text = f"{facts.where}: {facts.problem or facts.state}"
    if "version mismatch" in facts.problem:
        version = f" (the host runs {host.driver_version})" if host is not None and host.driver_version else ""
        text += f"; the driver's libraries in the {facts.where} must equal the host's kernel module{version}"
    if facts.state == NO_NVIDIA_SMI and facts.device_files:
        text += f", yet /dev has {facts.device_files} cards"
    return text


def _unclear_table(facts: GpuFacts) -> str:
    if facts.table == TABLE_HIDDEN:
        return (
            f"the {facts.where}'s nvidia-smi has processes that it cannot name (an empty table without "
            '"No running processes found"): they belong to another pid namespace'
        )
    return f"the {facts.where}'s nvidia-smi printed no process table"


def _strays(facts: GpuFacts, container: GpuFacts) -> list[str]:
    """Processes that no listed card can be blamed for: the card they use may be one of ours."""
    known = {card.uuid for card in (*facts.cards, *container.cards)}
    strays = [process for process in facts.processes if process.gpu_uuid not in known and _counts(process)]
    return [_process_sentence(process, facts.where) for process in strays]


def _counts(process: GpuProcess) -> bool:
    return not (process.source == "device file" and process.name in DRIVER_SERVICES)


def _process_sentence(process: GpuProcess, where: str) -> str:
    pid = f"pid {process.pid}" if process.pid is not None else "a process without a readable pid"
    owner = ""
    if process.guest:
        inner = f", pid {process.inner_pid} inside" if process.inner_pid is not None else ""
        owner = f" of guest {process.guest}{inner}"
    holds = f"holds {process.memory_mib:.0f} MiB" if process.memory_mib is not None else "uses it"
    if process.source == "device file":
        holds = "holds its device file open, though nvidia-smi does not list it"
    return f"{process.name} ({pid}{owner}) {holds} [{where}]"


def _notes(expected: Expected, container: GpuFacts, host: GpuFacts | None) -> tuple[str, ...]:
    notes: list[str] = []
    for card in container.cards:
        if card.ecc_uncorrected:
            notes.append(
                f"card {card.index}: {card.ecc_uncorrected} uncorrected memory errors since the driver was loaded"
            )
    if expected.count is not None and len(container.cards) > expected.count > 0:
        notes.append(f"{len(container.cards)} cards are there, {expected.count} expected")
    if host is not None and host.state == NO_NVIDIA_SMI and container.state != NO_NVIDIA_SMI:
        notes.append("the host has no nvidia-smi: other guests were judged by memory and utilization only")
    if host is not None and host.kernel_log:
        notes.append(
            f"the host's kernel log holds {len(host.kernel_log)} driver faults, the last: {host.kernel_log[-1]}"
        )
    return tuple(notes)


def _idle_sentence(expected: Expected, cards: Sequence[CardVerdict], views: Sequence[GpuFacts]) -> str:
    places = " and ".join(facts.where for facts in views)
    count = "1 card" if len(cards) == 1 else f"{len(cards)} cards"
    return (
        f"{count} idle: no process, at most {expected.memory_mib:g} MiB and {expected.utilization:g} % "
        f"in {max(1, expected.samples)} samples, seen from {places}"
    )


def _label(card: CardVerdict) -> str:
    return f"card {card.index}" if card.index is not None else f"card {card.uuid}"
