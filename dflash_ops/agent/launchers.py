"""Ways to start the supervisor so that it outlives this call: tmux, nohup, systemd.

Each takes argv and gives back what the run record calls its session. None of them writes the log: the supervisor
does, by redirection, because what a terminal multiplexer records is a screen, not a file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.agent.layout import Layout
from dflash_ops.errors import AgentFailed, EnvironmentUnfit, LockHeld, UsageError

SOCKET_PATH_LIMIT = 100  # sockaddr_un holds 107 bytes and tmux binds a longer name first
SYSTEMD_RUNNING = Path("/run/systemd/system")
CLOSING_S = 5.0
"""How long the session of the run before may take to close."""


def tmux_program() -> str | None:
    return shutil.which("tmux", path="/usr/local/bin:/usr/bin:/bin")


@dataclass(frozen=True, slots=True)
class Launched:
    """What was used. `note` says why, where it was not what was asked for."""

    launcher: str
    session: str
    note: str = ""


def choose(wanted: str) -> tuple[str, str]:
    """(launcher, note): `auto` is tmux where it is installed, else nohup."""
    if wanted != "auto":
        return wanted, ""
    if tmux_program():
        return "tmux", ""
    return "nohup", "tmux is not installed on the target: started with nohup, so `fab attach` has nothing to show"


def check(layout: Layout, launcher: str) -> None:
    """Raise before anything is written if this launcher cannot work here."""
    match launcher:
        case "tmux":
            if tmux_program() is None:
                raise EnvironmentUnfit(
                    "tmux is not installed on the target",
                    hint="apt install tmux there, or `launcher: nohup` in hosts.yaml",
                )
            if len(os.fsencode(layout.tmux_socket)) > SOCKET_PATH_LIMIT:
                raise EnvironmentUnfit(
                    f"{layout.tmux_socket} is too long for a socket",
                    hint="choose a shorter root: in hosts.yaml, or `launcher: nohup`",
                )
        case "systemd":
            if not SYSTEMD_RUNNING.is_dir():
                raise EnvironmentUnfit(
                    "the target does not run systemd",
                    why="PID 1 is something else",
                    hint="`launcher: tmux` in hosts.yaml",
                )
        case "nohup":
            pass
        case _:
            raise UsageError(f"no launcher {launcher!r}", hint="auto, tmux, nohup or systemd")


def start(layout: Layout, launcher: str, session: str, run_id: str, argv: Sequence[str]) -> Launched:
    """Start argv detached. It has not said anything when this returns."""
    match launcher:
        case "tmux":
            return Launched(launcher, _tmux(layout, session, argv))
        case "systemd":
            return Launched(launcher, _systemd(run_id, argv))
    subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    return Launched(launcher, "")


def attach_argv(layout: Layout, session: str) -> tuple[str, ...]:
    """What shows the session on a terminal. `=` because tmux would else take any session that begins so."""
    return (tmux_program() or "tmux", "-u", "-S", str(layout.tmux_socket), "attach-session", "-t", f"={session}")


def _tmux(layout: Layout, session: str, argv: Sequence[str]) -> str:
    import libtmux  # only this launcher needs it; the zipapp carries it

    # tmux turns its non-ASCII field separator into `_` under an unset locale.
    os.environ["LANG"] = "C.UTF-8"
    os.environ.pop("TMUX", None)
    server = libtmux.Server(
        socket_path=layout.tmux_socket,
        config_file="/dev/null",  # the operator's tmux.conf must not change what a session is
        tmux_bin=tmux_program(),
    )
    # Several words, so that tmux runs them without a shell.
    asked = ("-d", "-P", "-F", "#{session_name}", "-x", "200", "-y", "50", "-s", session, "--", *argv)
    ends_at = time.monotonic() + CLOSING_S
    while True:
        done = server.cmd("new-session", *asked)
        said = " ".join(done.stderr)
        if "duplicate session" not in said:
            break
        if time.monotonic() > ends_at:
            raise LockHeld(
                f"the tmux session {session!r} exists although no run holds the lock",
                why="somebody made it by hand, or an earlier run's session does not close",
                hint=f"look at it: tmux -S {layout.tmux_socket} attach -t ={session}",
            )
        time.sleep(0.1)
    if done.returncode != 0 or not done.stdout:
        raise AgentFailed("tmux could not start the session", why=said or f"exit code {done.returncode}")
    return str(done.stdout[0])  # as tmux spells it: `.` and `:` become `_`


def _systemd(run_id: str, argv: Sequence[str]) -> str:
    unit = f"dflash-{run_id}"
    command = [
        "systemd-run",
        f"--unit={unit}",
        "--collect",
        "--no-block",
        "--property=KillMode=mixed",
        "--property=TimeoutStopSec=60",
        "--property=StandardOutput=null",
        "--property=StandardError=null",
        "--",
        *argv,
    ]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AgentFailed("systemd-run did not start the run", why=str(error)) from None
    if done.returncode != 0:
        raise AgentFailed("systemd-run refused", why=done.stderr.decode("utf-8", "replace").strip())
    return unit
