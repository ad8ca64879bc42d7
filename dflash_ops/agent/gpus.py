"""Ask nvidia-smi and /proc who uses the GPUs. Stdlib only; runs in the container and on the Proxmox host.

Inside a container the driver still reports host pids, which mean nothing there. On the host every process is mapped
to its guest by /proc/PID/cgroup and to its pid in that guest by the NSpid line of /proc/PID/status.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dflash_ops.agent import nvidia_smi
from dflash_ops.agent.gpu_facts import NO_NVIDIA_SMI, OK, Card, GpuFacts, GpuProcess

SEARCH_PATH = "/usr/bin:/usr/local/bin:/usr/local/nvidia/bin:/usr/local/cuda/bin:/bin"


def find_program() -> str | None:
    """Where nvidia-smi is; None where it is not installed."""
    return shutil.which("nvidia-smi", path=f"{os.environ.get('PATH', '')}:{SEARCH_PATH}")


def probe(
    where: str,
    *,
    samples: int = 3,
    interval_s: float = 2.5,
    limit_s: float = 20.0,
    program: str | None = None,
    proc: Path = Path("/proc"),
) -> GpuFacts:
    """Everything seen from here; bad output becomes a fact, never an exception.

    Takes (samples - 1) * interval_s when nvidia-smi is well; `limit_s` bounds each of its runs, and the first run that
    fails or does not end is the last.
    """
    smi = program or find_program()
    facts = GpuFacts(
        where,
        OK,
        processes=tuple(device_holders(proc)),
        pci_cards=pci_cards(),
        device_files=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        kernel_log=kernel_faults() if where == "host" else (),
    )
    if smi is None:
        facts = replace(facts, state=NO_NVIDIA_SMI, problem="nvidia-smi is not installed here")
    else:
        try:
            facts = _with_readings(facts, smi, samples, interval_s, limit_s)
        except nvidia_smi.Fault as fault:
            facts = replace(facts, state=fault.state, problem=str(fault))
    if where == "host":
        facts = replace(facts, processes=tuple(_with_guest(process, proc) for process in facts.processes))
    return facts


def _with_readings(facts: GpuFacts, smi: str, samples: int, interval_s: float, limit_s: float) -> GpuFacts:
    readings: list[dict[str, Card]] = []
    processes: list[GpuProcess] = []
    driver: str | None = None
    for turn in range(samples):
        if turn:
            time.sleep(interval_s)
        cards, driver = nvidia_smi.cards(smi, limit_s)
        readings.append({card.uuid: card for card in cards})
        if turn in (0, samples - 1):  # a process that came or went between is seen by its memory
            processes += nvidia_smi.apps(smi, limit_s)
    merged = merge_readings(readings)
    table, rows = nvidia_smi.table(smi, limit_s, {card.index: card.uuid for card in merged})
    return replace(
        facts,
        cards=merged,
        processes=tuple(_distinct([*processes, *rows, *facts.processes])),
        table=table,
        driver_version=driver,
    )


def merge_readings(readings: Sequence[dict[str, Card]]) -> tuple[Card, ...]:
    """One card per UUID with all its samples; a card that vanished between two readings keeps the fewer samples."""
    merged: dict[str, Card] = {}
    for reading in readings:
        for uuid, card in reading.items():
            known = merged.get(uuid)
            if known is None:
                merged[uuid] = card
            else:
                unreadable = tuple(dict.fromkeys((*known.unreadable, *card.unreadable)))
                merged[uuid] = replace(known, samples=known.samples + card.samples, unreadable=unreadable)
    return tuple(sorted(merged.values(), key=lambda card: (card.index is None, card.index or 0, card.uuid)))


def device_holders(proc: Path = Path("/proc")) -> list[GpuProcess]:
    """Processes that hold /dev/nvidia0, /dev/nvidia1, ... open; NVML does not list all of them."""
    uuids = _uuid_by_minor(proc)
    found: list[GpuProcess] = []
    for folder in proc.glob("[0-9]*"):
        try:
            targets = {link.readlink().name for link in (folder / "fd").iterdir() if _is_card(link)}
            name = (folder / "comm").read_text().strip()
        except OSError:
            continue  # ended meanwhile, or not ours to read
        for target in sorted(targets):
            minor = int(target.removeprefix("nvidia"))
            found.append(GpuProcess(uuids.get(minor), int(folder.name), name, "device file"))
    return found


def guest_of(pid: int, proc: Path = Path("/proc")) -> tuple[str | None, int | None]:
    """("lxc/200", pid inside) of a process seen from the host; (None, None) when it belongs to no guest."""
    try:
        cgroup = (proc / str(pid) / "cgroup").read_text()
        status = (proc / str(pid) / "status").read_text()
    except OSError:
        return None, None
    container = re.search(r"/lxc(?:/|\.payload[./])(\d+)(?:[-./\s]|$)", cgroup)
    machine = re.search(r"/qemu\.slice/(\d+)\.scope", cgroup)
    if container is None:
        return (f"qemu/{machine[1]}" if machine else None), None
    pids = re.search(r"^NSpid:\s+\d+(?:\s+\d+)*\s+(\d+)$", status, re.MULTILINE)
    return f"lxc/{container[1]}", int(pids[1]) if pids else None


def kernel_faults(path: Path = Path("/dev/kmsg"), keep: int = 20) -> tuple[str, ...]:
    """The driver's fault lines in the kernel log, newest last; empty where the log may not be read."""
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ()
    found: list[str] = []
    end = time.monotonic() + 2.0
    try:
        while time.monotonic() < end:
            try:
                record = os.read(log, 8192)
            except BrokenPipeError:
                continue  # the ring buffer overtook us; the next read goes on behind the gap
            if not record:
                break
            line = record.decode("utf-8", "replace").partition(";")[2].splitlines()[:1]
            if line and re.search(r"NVRM: Xid|fallen off the bus|NVRM: API mismatch|GPU is lost", line[0]):
                found.append(line[0][:300])
    except OSError:
        pass  # EAGAIN: read to the end; anything else: what was read so far still counts
    finally:
        os.close(log)
    return tuple(found[-keep:])


def _distinct(processes: Sequence[GpuProcess]) -> list[GpuProcess]:
    """One entry for each process and card; the first source to name it, which knows most, wins."""
    kept: dict[tuple[str | None, int | None], GpuProcess] = {}
    for process in processes:
        key = (process.gpu_uuid, process.pid)
        unnamed = process.pid is None  # cannot be told from another unnamed one: keep each
        if unnamed or key not in kept:
            kept[key if not unnamed else (process.gpu_uuid, -1 - len(kept))] = process
    return list(kept.values())


def _with_guest(process: GpuProcess, proc: Path) -> GpuProcess:
    if process.pid is None:
        return process
    guest, inner = guest_of(process.pid, proc)
    return replace(process, guest=guest, inner_pid=inner)


def _is_card(link: Path) -> bool:
    try:
        return re.fullmatch(r"/dev/nvidia\d+", str(link.readlink())) is not None
    except OSError:
        return False


def _uuid_by_minor(proc: Path) -> dict[int, str]:
    uuids: dict[int, str] = {}
    for path in proc.glob("driver/nvidia/gpus/*/information"):
        try:
            text = path.read_text()
        except OSError:
            continue
        uuid, minor = re.search(r"GPU UUID:\s+(\S+)", text), re.search(r"Device Minor:\s+(\d+)", text)
        if uuid and minor:
            uuids[int(minor[1])] = uuid[1]
    return uuids


def pci_cards(devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """NVIDIA GPUs on the PCI bus (classes 0300 and 0302; NVSwitch bridges have another). None: no PCI bus here."""
    if not devices.is_dir():
        return None
    count = 0
    for device in devices.iterdir():
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        count += vendor == "0x10de" and kind[:6] in ("0x0300", "0x0302")
    return count
