"""What a probe of the GPUs saw, as frozen facts that travel as JSON. Stdlib only: ships inside the agent.

A fact is a reading, never an opinion: a field that nvidia-smi did not give as a number is None, with the text it
gave kept in `Card.unreadable`. What the facts mean is decided by `dflash_ops.preflight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

OK = "ok"  # nvidia-smi answered, and its answer could be read
NO_NVIDIA_SMI = "no_nvidia_smi"  # not installed: a machine without GPUs, or without the driver's tools
FAILED = "failed"  # it ended with an error, or its answer makes no sense; `problem` says which
TIMED_OUT = "timed_out"  # it did not end within its limit

TABLE_EMPTY = "empty"  # "No running processes found"
TABLE_NAMED = "named"  # rows that name processes
TABLE_HIDDEN = "hidden"  # neither: processes exist that this pid namespace cannot name
TABLE_UNREAD = "unread"  # no table was seen


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of one card; None where nvidia-smi gave no number."""

    memory_mib: float | None
    utilization: float | None  # percent
    power_w: float | None = None


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU as nvidia-smi names it, with its samples in order of time."""

    uuid: str
    index: int | None
    name: str
    samples: tuple[Sample, ...]
    memory_total_mib: float | None = None
    mig: bool | None = None
    compute_mode: str | None = None
    ecc_uncorrected: int | None = None
    unreadable: tuple[str, ...] = ()  # "utilization.gpu: [N/A]"


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that uses a card, or holds its device file open.

    `gpu_uuid` is None where the card is not known. `guest` ("lxc/200", "qemu/101") and `inner_pid`, the pid inside
    that guest, are known only where the probe runs on the host of the guests.
    """

    gpu_uuid: str | None
    pid: int | None
    name: str
    source: str  # "compute-apps" | "table" | "device file"
    memory_mib: float | None = None
    guest: str | None = None
    inner_pid: int | None = None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """All that one probe saw from one place ("container", "host" or "machine")."""

    where: str
    state: str
    problem: str = ""
    cards: tuple[Card, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    table: str = TABLE_UNREAD
    driver_version: str | None = None
    pci_cards: int | None = None  # NVIDIA display controllers on the PCI bus
    device_files: int = 0  # /dev/nvidia0, /dev/nvidia1, ...
    kernel_log: tuple[str, ...] = ()  # driver faults (Xid, "fallen off the bus"), newest last; host only

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> GpuFacts:
        """The facts again. A malformed answer gives FAILED facts, which can never be judged idle."""
        try:
            return _facts(_mapping(data))
        except (KeyError, TypeError, ValueError) as fault:
            return cls(where="unknown", state=FAILED, problem=f"the probe's answer is malformed ({fault})")


def _facts(data: Mapping[str, Any]) -> GpuFacts:
    state = _text(data["state"])
    if state not in (OK, NO_NVIDIA_SMI, FAILED, TIMED_OUT):
        raise ValueError(f"state {state!r}")
    return GpuFacts(
        where=_text(data["where"]),
        state=state,
        problem=_text(data["problem"]),
        cards=tuple(_card(_mapping(item)) for item in _items(data["cards"])),
        processes=tuple(_process(_mapping(item)) for item in _items(data["processes"])),
        table=_text(data["table"]),
        driver_version=_optional_text(data["driver_version"]),
        pci_cards=_optional_int(data["pci_cards"]),
        device_files=_optional_int(data["device_files"]) or 0,
        kernel_log=tuple(_text(line) for line in _items(data["kernel_log"])),
    )


def _card(data: Mapping[str, Any]) -> Card:
    mig = data["mig"]
    if mig is not None and not isinstance(mig, bool):
        raise ValueError(f"mig {mig!r}")
    return Card(
        uuid=_text(data["uuid"]),
        index=_optional_int(data["index"]),
        name=_text(data["name"]),
        samples=tuple(_sample(_mapping(item)) for item in _items(data["samples"])),
        memory_total_mib=_optional_number(data["memory_total_mib"]),
        mig=mig,
        compute_mode=_optional_text(data["compute_mode"]),
        ecc_uncorrected=_optional_int(data["ecc_uncorrected"]),
        unreadable=tuple(_text(item) for item in _items(data["unreadable"])),
    )


def _sample(data: Mapping[str, Any]) -> Sample:
    return Sample(
        memory_mib=_optional_number(data["memory_mib"]),
        utilization=_optional_number(data["utilization"]),
        power_w=_optional_number(data["power_w"]),
    )


def _process(data: Mapping[str, Any]) -> GpuProcess:
    return GpuProcess(
        gpu_uuid=_optional_text(data["gpu_uuid"]),
        pid=_optional_int(data["pid"]),
        name=_text(data["name"]),
        source=_text(data["source"]),
        memory_mib=_optional_number(data["memory_mib"]),
        guest=_optional_text(data["guest"]),
        inner_pid=_optional_int(data["inner_pid"]),
    )


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    return value


def _items(value: object) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"expected a list, got {type(value).__name__}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, got {type(value).__name__}")
    return value


def _optional_text(value: object) -> str | None:
    return None if value is None else _text(value)


def _optional_int(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"expected an integer, got {value!r}")
    return value


def _optional_number(value: object) -> float | None:
    if value is None:
        return None
    # nan and infinities are no readings: nan <= limit is False, but -inf would pass as idle.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ValueError(f"expected a number from 0, got {value!r}")
    return float(value)
