"""The gate: order, door, and the deadline that ends a hung warm-up."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from trainer.gate import Gate, Overdue, all_stacks
from trainer.scope import Cancelled, Scope

WAIT_S = 120.0


def never(overdue: Overdue) -> None:
    raise AssertionError(f"not overdue: {overdue}")


def test_one_at_a_time_in_order_then_the_door() -> None:
    """Fails when `turn` lets anyone through, or when `wait_open` looks at the first turn only."""
    scope = Scope()
    order = ["drafter0", "drafter1", "drafter2", "verifier0"]
    ready: list[str] = []
    events: list[str] = []
    inside = threading.Semaphore(1)
    gate = Gate(order, deadline_s=WAIT_S, on_overdue=never, on_ready=lambda n, s: ready.append(n), scope=scope)

    def warm(name: str) -> None:
        with gate.turn(name):
            assert inside.acquire(blocking=False), "two threads were inside"
            events.append(name)
            inside.release()

    def follow() -> None:
        gate.wait_open()
        events.append("open")

    scope.go("target0", follow)
    for name in reversed(order):
        scope.go(name, lambda name=name: warm(name))
    assert scope.wait(WAIT_S), scope.alive()
    assert scope.error is None
    assert events == [*order, "open"]
    assert ready == order
    assert gate.is_open


def test_a_failed_warm_up_keeps_the_door_shut() -> None:
    scope = Scope()
    gate = Gate(["drafter0", "drafter1"], deadline_s=WAIT_S, on_overdue=never, scope=scope)
    opened: list[str] = []

    def fails() -> None:
        with gate.turn("drafter0"):
            raise RuntimeError("compile failed")

    def follow() -> None:
        gate.wait_open()
        opened.append("target")

    def second() -> None:
        with gate.turn("drafter1"):
            opened.append("drafter1")

    scope.go("target0", follow)
    scope.go("drafter1", second)
    scope.go("drafter0", fails)
    assert scope.wait(WAIT_S)
    assert opened == []
    assert scope.error is not None
    assert scope.error.stage == "drafter0"


def test_cancel_wakes_those_who_wait() -> None:
    gate = Gate(["drafter0"], deadline_s=WAIT_S, on_overdue=never)
    gate.cancel()
    with pytest.raises(Cancelled):
        gate.wait_open()


def test_a_thread_without_a_turn_is_refused() -> None:
    gate = Gate([], deadline_s=WAIT_S, on_overdue=never)
    assert gate.is_open
    with pytest.raises(ValueError, match="no turn"), gate.turn("target0"):
        pass


def test_the_culprit_is_named_even_if_it_never_came() -> None:
    seen: list[Overdue] = []
    told = threading.Event()

    def tell(overdue: Overdue) -> None:
        seen.append(overdue)
        told.set()

    gate = Gate(["drafter0"], deadline_s=0.01, on_overdue=tell)
    assert told.wait(WAIT_S)
    assert seen[0].culprit == "drafter0"
    gate.cancel()


def test_stacks_name_every_thread_and_put_the_culprit_first() -> None:
    release = threading.Event()
    started = threading.Event()

    def hang_here() -> None:
        started.set()
        release.wait(WAIT_S)

    thread = threading.Thread(target=hang_here, name="drafter7", daemon=True)
    thread.start()
    assert started.wait(WAIT_S)
    text = all_stacks(first="drafter7")
    release.set()
    assert text.startswith("--- thread drafter7 ---")
    assert "hang_here" in text
    assert "MainThread" in text


HANGS_HOLDING_THE_INTERPRETER = """
import ctypes, threading
from trainer.gate import Gate
import trainer.gate
trainer.gate.ALARM_GRACE_S = 0.3
gate = Gate(["drafter0"], deadline_s=0.5, on_overdue=lambda o: None, alarm=True)
libc = ctypes.PyDLL(None)  # PyDLL keeps the interpreter lock during the call
with gate.turn("drafter0"):
    libc.sleep(600)
"""


def test_a_native_hang_that_keeps_the_interpreter_lock_still_ends() -> None:
    """Fails (times out) without the alarm: no Python thread can run, the watchdog included."""
    done = subprocess.run([sys.executable, "-c", HANGS_HOLDING_THE_INTERPRETER], timeout=WAIT_S, check=False)
    assert done.returncode == -14  # SIGALRM
