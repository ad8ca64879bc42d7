"""Running nvidia-smi under a limit, and reading what it prints. Stdlib only: ships inside the agent.

Every run has a time limit: nvidia-smi can hang for good after an OOM kill or with a lost card, and then not even
SIGKILL ends it (uninterruptible sleep), so a hanging child is abandoned, never waited for.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence

from dflash_ops.agent.gpu_facts import (
    FAILED,
    TABLE_EMPTY,
    TABLE_HIDDEN,
    TABLE_NAMED,
    TABLE_UNREAD,
    TIMED_OUT,
    Card,
    GpuProcess,
    Sample,
)

MIB = {"MiB": 1.0, "GiB": 1024.0, "KiB": 1 / 1024}


# The basic fields exist in every driver that can run an H200 or its elders; the rest are left out where refused.
BASIC_FIELDS = ("index", "uuid", "name", "memory.used", "memory.total", "utilization.gpu", "driver_version")
MORE_FIELDS = ("compute_mode", "mig.mode.current", "power.draw", "ecc.errors.uncorrected.volatile.total")
APP_FIELDS = ("gpu_uuid", "pid", "used_memory", "process_name")

# GPU, instance ids (newer drivers only), pid, type (C, G, M, C+G), name, memory.
TABLE_ROW = re.compile(r"\|\s+(\d{1,5})\s+(?:\S+\s+\S+\s+)?(\d{1,10})\s+[CGM+]+\s+(.*?)\s+(\S+)\s*\|\s*$", re.ASCII)


class Fault(Exception):
    """nvidia-smi gave no answer that can be read. `state` is FAILED or TIMED_OUT; the text says why."""

    def __init__(self, state: str, problem: str) -> None:
        super().__init__(problem)
        self.state = state


def cards(smi: str, limit_s: float) -> tuple[list[Card], str | None]:
    """All cards with one sample each, and the driver's version."""
    try:
        text = ask([smi, f"--query-gpu={','.join(BASIC_FIELDS + MORE_FIELDS)}", "--format=csv"], limit_s)
    except Fault as fault:
        if "is not a valid field to query" not in str(fault):
            raise
        text = ask([smi, f"--query-gpu={','.join(BASIC_FIELDS)}", "--format=csv"], limit_s)
    found, driver = parse_cards(text)
    if not found:
        raise Fault(FAILED, f"nvidia-smi lists no card: {first_line(text)}")
    return found, driver


def apps(smi: str, limit_s: float) -> list[GpuProcess]:
    """The compute processes NVML knows, of all guests when asked on the host."""
    return parse_apps(ask([smi, f"--query-compute-apps={','.join(APP_FIELDS)}", "--format=csv"], limit_s))


def table(smi: str, limit_s: float, uuids: dict[int | None, str]) -> tuple[str, list[GpuProcess]]:
    """The process table of plain nvidia-smi, see `parse_table`."""
    return parse_table(ask([smi], limit_s), uuids)


def ask(argv: Sequence[str], limit_s: float) -> str:
    """stdout and stderr of one run. Into a file: a child that cannot be killed then holds neither a pipe nor us."""
    with tempfile.TemporaryFile() as out:
        try:
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise Fault(FAILED, f"{argv[0]} cannot be run: {error.strerror}") from error
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired as late:
            os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1.0)
            raise Fault(TIMED_OUT, f"nvidia-smi did not end within {limit_s:g} s; the driver hangs") from late
        out.seek(0)
        text = out.read(4 << 20).decode("utf-8", "replace")
    lost = re.search(r"Unable to determine the device handle[^\n]*|GPU is lost[^\n]*", text)
    if lost:
        raise Fault(FAILED, f"a card is lost: {lost[0].strip()}")
    if code != 0:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        raise Fault(FAILED, f"nvidia-smi ended with {code}: {'; '.join(lines[:3])[:400] or 'no message'}")
    return text


def parse_cards(text: str) -> tuple[list[Card], str | None]:
    """Cards with one sample each, and the driver's version, from `--query-gpu=... --format=csv` with its header."""
    cards: list[Card] = []
    driver: str | None = None
    for row in rows(text, last="name"):
        uuid = row.get("uuid", "")
        if not uuid.startswith(("GPU-", "MIG-")):
            continue  # a warning between the lines, or a line cut short
        unreadable: list[str] = []

        def read(field: str, row: dict[str, str] = row, unreadable: list[str] = unreadable) -> float | None:
            value = row.get(field, "")
            number = parse_number(value)
            if number is None:
                unreadable.append(f"{field}: {value or 'missing'}")
            return number

        sample = Sample(read("memory.used"), read("utilization.gpu"), parse_number(row.get("power.draw", "")))
        index, ecc = (
            parse_number(row.get("index", "")),
            parse_number(row.get("ecc.errors.uncorrected.volatile.total", "")),
        )
        mode = row.get("mig.mode.current", "")
        driver = row.get("driver_version") or driver
        cards.append(
            Card(
                uuid=uuid,
                index=None if index is None else int(index),
                name=row.get("name", ""),
                samples=(sample,),
                memory_total_mib=parse_number(row.get("memory.total", "")),
                mig={"Enabled": True, "Disabled": False}.get(mode),
                compute_mode=row.get("compute_mode"),
                ecc_uncorrected=None if ecc is None else int(ecc),
                unreadable=tuple(unreadable),
            )
        )
    return cards, driver


def parse_apps(text: str) -> list[GpuProcess]:
    """Processes from `--query-compute-apps=... --format=csv`. A row that makes no sense is still a process."""
    found: list[GpuProcess] = []
    for row in rows(text, last="process_name"):
        pid = parse_number(row.get("pid", ""))
        uuid = row.get("gpu_uuid", "")
        found.append(
            GpuProcess(
                gpu_uuid=uuid if uuid.startswith("GPU-") else None,
                pid=None if pid is None else int(pid),
                name=row.get("process_name", "") or "[unnamed]",
                source="compute-apps",
                memory_mib=parse_number(row.get("used_gpu_memory", row.get("used_memory", ""))),
            )
        )
    return found


def parse_table(text: str, uuids: dict[int | None, str]) -> tuple[str, list[GpuProcess]]:
    """The process table of plain `nvidia-smi`: (TABLE_..., its rows).

    A table without rows and without the sentence "No running processes found" means that processes exist which
    cannot be named from here (other pid namespace): NVML lists their pids, /proc does not have them.
    """
    _, heading, body = text.partition("Processes:")
    if not heading:
        return TABLE_UNREAD, []
    rows: list[GpuProcess] = []
    for line in body.splitlines():
        if match := TABLE_ROW.match(line):
            index, pid, name, memory = match.groups()
            rows.append(GpuProcess(uuids.get(int(index)), int(pid), name, "table", parse_number(memory)))
    if rows:
        return TABLE_NAMED, rows
    return (TABLE_EMPTY if "No running processes found" in body else TABLE_HIDDEN), rows


def parse_number(text: str) -> float | None:
    """A reading in its field's unit (memory in MiB); None for `[N/A]`, `[Not Supported]`, an error or nonsense.

    >>> parse_number("4623 MiB"), parse_number("2 %"), parse_number("[Unknown Error]")
    (4623.0, 2.0, None)
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*(MiB|GiB|KiB|%|W)?", text.strip(), re.ASCII)
    if match is None:
        return None
    return float(match[1]) * MIB.get(match[2] or "", 1.0)


def rows(text: str, *, last: str) -> list[dict[str, str]]:
    """CSV with a header, each column named without its unit. Surplus commas belong to the column `last`."""
    lines = [line for line in text.splitlines() if line.strip()]
    start = next((number for number, line in enumerate(lines) if {"uuid", "gpu_uuid"} & set(line.split(", "))), None)
    if start is None:
        raise Fault(FAILED, f"nvidia-smi's answer has no header: {first_line(text)}")
    header = [column.split(" [")[0].strip() for column in lines[start].split(", ")]
    rows = []
    for line in lines[start + 1 :]:
        cells = [cell.strip() for cell in line.split(", ")]
        surplus = len(cells) - len(header)
        if surplus > 0 and last in header:
            at = header.index(last)
            cells[at : at + surplus + 1] = [", ".join(cells[at : at + surplus + 1])]
        rows.append(dict(zip(header, cells, strict=False)))
    return rows


def first_line(text: str) -> str:
    return next((line.strip()[:200] for line in text.splitlines() if line.strip()), "no output")
