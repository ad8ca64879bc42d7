"""`fab provision` from the operator's side: the lock, the wheels, the base Python."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dflash_ops.agent.provision import (
    WHEEL,
    Provisioned,
    ProvisionRequest,
    WheelAnswer,
    WheelRequest,
    read_lock,
)
from dflash_ops.errors import UsageError
from dflash_ops.named_file import require_regular
from dflash_ops.remote import Remote
from dflash_ops.settings import Target

DEADLINE_S = 7200.0
WHEEL_DEADLINE_S = 1800.0


def provision(
    remote: Remote, target: Target, lock: Path, wheelhouse: Path | None, base: str, who: str, say: Callable[[str], None]
) -> Provisioned:
    """Build the target's environment from `lock` and switch to it. `base`: the Python to build it with, if another."""
    text = _text(lock)
    read_lock(text)  # refused here before anything moves
    # The agent itself must run on a Python that is there before the first environment is.
    remote = Remote(remote.transport, replace(remote.place, python=base)) if base else remote
    if wheelhouse is not None:
        _send_wheels(remote, wheelhouse, say)
    request = ProvisionRequest(who, text, wheelhouse is not None)
    return remote.call(
        "provision", request, Provisioned, deadline=DEADLINE_S, on_progress=lambda line: say(line) if line else None
    )


def _send_wheels(remote: Remote, directory: Path, say: Callable[[str], None]) -> None:
    """One file at a time; what is there with the right hash is not sent again, so a cut upload goes on."""
    try:
        wheels = sorted(path for path in directory.iterdir() if WHEEL.match(path.name) and path.is_file())
    except OSError as error:
        raise UsageError(f"{directory}: cannot be read", why=error.strerror or str(error)) from None
    if not wheels:
        raise UsageError(f"{directory} holds no wheels", hint="pip download -r LOCK -d DIR fills it")
    for path in wheels:
        data = path.read_bytes()
        request = WheelRequest(path.name, hashlib.sha256(data).hexdigest())
        if remote.call("wheel", request, WheelAnswer, deadline=WHEEL_DEADLINE_S).present:
            continue
        say(f"sending {path.name}: {len(data):,} bytes")
        remote.call("wheel", request, WheelAnswer, deadline=WHEEL_DEADLINE_S, payload=data)


def _text(path: Path) -> str:
    try:
        return require_regular(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: cannot be read as a lock", why=str(error), hint="--lock FILE: requirements with hashes"
        ) from None
