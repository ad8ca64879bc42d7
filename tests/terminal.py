"""An operator's terminal: a pseudo-terminal with a person at the other end who reads all that comes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Terminal:
    """Runs one program on a pseudo-terminal of its own, as its controlling terminal.

    What the program shows is read all the time: a full terminal would hold it up.
    """

    def __init__(
        self, argv: Sequence[str], cwd: Path, environment: Mapping[str, str], columns: int = 80, lines: int = 24
    ) -> None:
        self._person, self._device = os.openpty()
        self.resize(columns, lines)
        self.before = self.modes()
        self._shown = bytearray()
        self.process = subprocess.Popen(
            list(argv),
            cwd=cwd,
            env={**environment, "TERM": "xterm"},
            stdin=self._device,
            stdout=self._device,
            stderr=self._device,
            start_new_session=True,
            preexec_fn=self._take,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def shown(self) -> str:
        """All that the program wrote so far, with its control sequences."""
        return bytes(self._shown).decode("utf-8", "replace")

    def type(self, keys: bytes) -> None:
        """Key by key, as a person does: what comes within a millisecond tmux may take for pasted text."""
        for key in keys:
            os.write(self._person, bytes([key]))
            time.sleep(0.02)

    def resize(self, columns: int, lines: int) -> None:
        """As when the person pulls at the window's corner: the program is told by SIGWINCH."""
        fcntl.ioctl(self._person, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def modes(self) -> list[Any]:
        """The terminal's settings: echo, line editing, signals."""
        return termios.tcgetattr(self._device)

    def close(self) -> None:
        """End the program and the terminal."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._device)  # the reader sees the end once nobody has the device
        self._reader.join(10)
        os.close(self._person)

    def _take(self) -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO: nobody has the device any more
            while piece := os.read(self._person, 1 << 16):
                self._shown += piece
