"""What a machine says of its GPUs, stored as files that may go into a repository: names and serial numbers replaced."""

from __future__ import annotations

import re
import shutil
import socket
from pathlib import Path

from benchmarks.parts import Work
from dflash_ops.agent.nvidia_smi import (
    APP_FIELDS,
    BASIC_FIELDS,
    MORE_FIELDS,
    Fault,
    parse_apps,
    parse_cards,
    parse_table,
)

LIMIT_S = 30.0
QUERIES: dict[str, list[str]] = {
    "idle.txt": [],
    "gpus_idle.csv": [f"--query-gpu={','.join(BASIC_FIELDS + MORE_FIELDS)}", "--format=csv"],
    "apps_idle.csv": [f"--query-compute-apps={','.join(APP_FIELDS)}", "--format=csv"],
    "query.txt": ["-q"],
    "topology.txt": ["topo", "-m"],
    "peer_reads.txt": ["topo", "-p2p", "r"],
    "links.txt": ["nvlink", "--status"],
}
"""File -> arguments of nvidia-smi; the first three are what the operator's probe asks."""

_UUID = re.compile(r"\b([A-Z]+-)?[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE)
_NUMBERED = re.compile(
    r"^(\s*(?:[\w ]*Serial(?: Number)?|GPU PDI|Board ID|Chassis[\w ]*|Host ID|[\w ]*GUID|Cluster ?UUID|Slot Number|"
    r"Tray Index|Peer Type|Module Id)\s*:\s*)(?!N/A)\S.*$",
    re.IGNORECASE | re.MULTILINE,
)


def scrub(text: str, host: str = "") -> str:
    """`text` without what names one machine: UUIDs become numbered ones, serial numbers zeros, the host `gpu-host`.

    Equal UUIDs stay equal, so that files of one machine still fit together only if scrubbed as one text.
    """
    seen: dict[str, str] = {}

    def numbered(match: re.Match[str]) -> str:
        number = len(seen)
        fresh = f"{match[1] or ''}{number:08x}-0000-4000-8000-{number:012x}"
        return seen.setdefault(match[0].lower(), fresh)

    text = _NUMBERED.sub(lambda match: match[1] + "0", text)
    text = _UUID.sub(numbered, text)
    if len(host) > 2 and host != "localhost":
        text = re.sub(rf"\b{re.escape(host)}\b", "gpu-host", text)
    return text


def record(work: Work, folder: Path) -> int:
    """Ask everything, store it, and read it back as the operator's probe would; returns the number of cards."""
    program = shutil.which("nvidia-smi")
    if program is None:
        work.note("nvidia-smi is not installed here: nothing recorded")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    asked: dict[str, str] = {}
    for name, arguments in QUERIES.items():
        done = work.call([program, *arguments], limit_s=LIMIT_S)
        if done.code == 0:
            asked[name] = done.text
        else:
            work.note(f"nvidia-smi {' '.join(arguments)}: exit {done.code}, {done.text.strip()[:200]}")
    # As one text, so that a card has the same UUID in every file.
    mark = "\n\x00\n"
    for name, text in zip(asked, scrub(mark.join(asked.values()), socket.gethostname()).split(mark), strict=True):
        (folder / name).write_text(text)
        asked[name] = text
    try:
        cards, driver = parse_cards(asked.get("gpus_idle.csv", ""))
        table, _ = parse_table(asked.get("idle.txt", ""), {card.index: card.uuid for card in cards})
        work.number("cards", [{"index": c.index, "name": c.name, "memory_mib": c.memory_total_mib} for c in cards])
        work.number("driver", driver)
        work.number("process table", table)
        work.number("compute processes", len(parse_apps(asked.get("apps_idle.csv", ""))))
        work.check("the recorded files are read by the operator's parsers", bool(cards))
        return len(cards)
    except Fault as fault:
        work.check(f"the recorded files are read by the operator's parsers ({fault})", False)
        return 0
