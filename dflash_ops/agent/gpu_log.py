"""What each card does while a run goes on: one line in gpu.jsonl every half minute, written by the supervisor.

The trainer cannot do this itself: a thread that hangs on a lost card is the very moment that matters.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.agent import gpus, nvidia_smi, records

EVERY_S = 30.0
LIMIT_S = 10.0
FIELDS = ("uuid", "index", "memory.used", "memory.total", "utilization.gpu", "power.draw", "temperature.gpu")


@dataclass(frozen=True, slots=True)
class Reading:
    """One card at one moment; None where nvidia-smi gave no number."""

    index: int | None
    uuid: str
    memory_mib: float | None
    memory_total_mib: float | None
    utilization: float | None
    """Percent."""
    power_w: float | None
    temperature_c: float | None


def read() -> tuple[Reading, ...]:
    """Every card now; empty where there is none or nvidia-smi does not answer in time."""
    smi = gpus.find_program()
    if smi is None:
        return ()
    try:
        text = nvidia_smi.ask([smi, f"--query-gpu={','.join(FIELDS)}", "--format=csv"], LIMIT_S)
        return parse(text)
    except nvidia_smi.Fault:
        return ()


def parse(text: str) -> tuple[Reading, ...]:
    """nvidia-smi's CSV with its header. Raises `nvidia_smi.Fault` on text without a header."""
    found = []
    for row in nvidia_smi.rows(text, last="uuid"):
        uuid = row.get("uuid", "")
        if not uuid.startswith(("GPU-", "MIG-")):
            continue
        number = {field: nvidia_smi.parse_number(row.get(field, "")) for field in FIELDS}
        index = number["index"]
        found.append(
            Reading(
                index=None if index is None else int(index),
                uuid=uuid,
                memory_mib=number["memory.used"],
                memory_total_mib=number["memory.total"],
                utilization=number["utilization.gpu"],
                power_w=number["power.draw"],
                temperature_c=number["temperature.gpu"],
            )
        )
    return tuple(found)


def append(directory: Path) -> bool:
    """Add one line to a run's gpu.jsonl; False where there is nothing to read or no room to write."""
    readings = read()
    if not readings:
        return False
    body = {"event": "gpu", "time": time.time(), "cards": [records.dump(reading) for reading in readings]}
    try:
        descriptor = os.open(directory / "gpu.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, json.dumps(body).encode() + b"\n")
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True
