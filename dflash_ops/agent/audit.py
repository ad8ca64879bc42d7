"""audit.jsonl: one line for every verb that changed the target."""

from __future__ import annotations

import contextlib
import json
import os
import time

from dflash_ops.agent.layout import Layout


def append(layout: Layout, verb: str, who: str, detail: str) -> None:
    """One line in audit.jsonl for every verb that changes the target."""
    line = json.dumps({"time": time.time(), "verb": verb, "who": who, "detail": detail}) + "\n"
    with contextlib.suppress(OSError):  # the work is done; a full disk must not make it look failed
        descriptor = os.open(layout.audit, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
