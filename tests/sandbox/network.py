"""A laptop far from its host: a network namespace of its own, and a wire to it with delay and loss.

The wire is this process: it carries IP packets between a TUN device at each end, each packet late by `delay_s`
and lost with probability `loss`. (`tc netem` does the same, in kernels that have it; many small ones do not.) TCP on
both sides is the kernel's own, with its real retransmissions.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import selectors
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

TUNSETIFF = 0x400454CA
IFF_TUN_NO_PI = 0x1001
MTU = 1500


def missing() -> str:
    """Why there can be no such network here; empty where there can."""
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"/dev/net/tun: {error.strerror}"
    return ""


@dataclass
class Wire:
    """Packets in flight between two file descriptors. Change `delay_s` and `loss` at any time."""

    ends: tuple[int, int]
    delay_s: float = 0.0
    loss: float = 0.0
    carried: int = 0
    lost: int = 0
    _dice: random.Random = field(default_factory=lambda: random.Random(7))
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        order = itertools.count()
        flying: list[tuple[float, int, int, bytes]] = []
        with selectors.DefaultSelector() as selector:
            for end in self.ends:
                os.set_blocking(end, False)
                selector.register(end, selectors.EVENT_READ)
            while not self._stop.is_set():
                wait = max(0.0, flying[0][0] - time.monotonic()) if flying else 0.2
                for key, _ in selector.select(min(wait, 0.2)):
                    self._take(key.fd, flying, order)
                now = time.monotonic()
                while flying and flying[0][0] <= now:
                    _, _, to, packet = heapq.heappop(flying)
                    with contextlib.suppress(OSError):  # the device is full or gone: a lost packet
                        os.write(to, packet)
                        self.carried += 1

    def _take(self, end: int, flying: list[tuple[float, int, int, bytes]], order: Iterator[int]) -> None:
        other = self.ends[1] if end == self.ends[0] else self.ends[0]
        for _ in range(64):
            try:
                packet = os.read(end, MTU + 100)
            except BlockingIOError:
                return
            if self._dice.random() < self.loss:
                self.lost += 1
                continue
            heapq.heappush(flying, (time.monotonic() + self.delay_s, next(order), other, packet))

    def stop(self) -> None:
        self._stop.set()


@dataclass(frozen=True)
class Network:
    """The laptop's place (run a command there with `ip netns exec PLACE`), and where it finds the host."""

    laptop: str
    host_address: str
    wire: Wire


@contextlib.contextmanager
def network(delay_s: float = 0.0, loss: float = 0.0) -> Iterator[Network]:
    """The wire and its two ends, up; removed afterwards.

    The host is this machine's own namespace: LXC's tools find a container through an abstract socket, and those
    belong to a network namespace.
    """
    tag = f"dfl{os.getpid()}"
    number = os.getpid() % (1 << 14)  # two test runs on one machine have two wires
    place = f"{tag}-lap"
    laptop_address, host_address = (f"10.213.{number >> 6}.{number % 64 * 4 + end}" for end in (1, 2))
    ends: list[int] = []
    _ip("netns", "add", place)
    try:
        for count, inside in enumerate((["-n", place], [])):
            device = f"{tag}t{count}"
            ends.append(_tun(device))
            if inside:
                _ip("link", "set", device, "netns", place)
            here, there = (laptop_address, host_address) if inside else (host_address, laptop_address)
            _ip(*inside, "addr", "add", f"{here}/32", "peer", there, "dev", device)
            _ip(*inside, "link", "set", device, "up", "mtu", str(MTU))
        _ip("-n", place, "link", "set", "lo", "up")
        wire = Wire((ends[0], ends[1]), delay_s, loss)
        thread = threading.Thread(target=wire.run, daemon=True)
        thread.start()
        try:
            yield Network(place, host_address, wire)
        finally:
            wire.stop()
            thread.join(5)
    finally:
        for end in ends:
            os.close(end)  # the devices go with their descriptors
        _ip("netns", "del", place)


def _tun(device: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN_NO_PI))
    return file


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
