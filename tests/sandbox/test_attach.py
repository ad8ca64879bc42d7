"""`fab attach` through SSH and pct, on a real terminal, to a real tmux session in the container.

Shown able to fail: with the terminal left raw, with the window's change not passed on, and with keys swallowed, it went
red.
"""

from __future__ import annotations

import termios

import pytest

from tests.sandbox.laptop import Laptop
from tests.sandbox.test_tail import start_run
from tests.terminal import Terminal
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.sandbox
LOCAL_FLAGS = 3
"""Where termios has echo and line editing."""


def test_keys_window_and_detach(laptop: Laptop) -> None:
    laptop.write_hosts(launcher="tmux")
    remote, _ = start_run(laptop, "standin.steps=1000000")

    def asked(*words: str) -> str:
        return laptop.box.container.run("/usr/bin/tmux", "-S", f"{laptop.root}/tmux.sock", *words)

    def clients() -> list[str]:
        return asked("list-clients", "-F", "#{client_width} x #{client_height}").splitlines()

    terminal = Terminal(laptop.command("attach"), laptop.checkout, laptop.environment, columns=97, lines=31)
    try:
        wait_until(lambda: "step" in terminal.shown, "the log is shown")
        assert clients() == ["97 x 31"]
        assert not terminal.modes()[LOCAL_FLAGS] & (termios.ECHO | termios.ICANON | termios.ISIG)
        terminal.resize(111, 37)
        wait_until(lambda: clients() == ["111 x 37"], "the session has the new size")
        terminal.type(b"\x02c")  # a second window, with a shell
        wait_until(lambda: len(asked("list-windows").splitlines()) == 2, "tmux has heard its keys")
        terminal.type(b"echo all-''keys-arrive\r")
        wait_until(lambda: "all-keys-arrive" in terminal.shown, "the shell has heard the others")
        terminal.type(b"\x02d")
        assert terminal.process.wait(PATIENCE_S) == 0
        assert terminal.modes() == terminal.before
    finally:
        terminal.close()
    wait_until(lambda: not clients(), "tmux has let go of it")
    assert laptop.status(remote).state == "training"
