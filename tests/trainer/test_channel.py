"""Channels: Go's semantics under many threads. Every wait here has a deadline; nothing is timed."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.channel import Channel, Closed
from trainer.scope import Cancelled, Scope, StageError, Stalled

WAIT_S = 120.0


def finish(scope: Scope) -> None:
    assert scope.wait(WAIT_S), f"still running: {scope.alive()}"


class TestDelivery:
    @settings(max_examples=25, deadline=None)
    @given(
        capacity=st.integers(1, 4),
        senders=st.integers(1, 6),
        receivers=st.integers(1, 6),
        items=st.integers(0, 60),
    )
    def test_every_item_reaches_exactly_one_receiver(
        self, capacity: int, senders: int, receivers: int, items: int
    ) -> None:
        """Fails with `popleft` replaced by `self._items[0]` (doubles) or with `put` dropping when full (losses)."""
        scope = Scope()
        channel: Channel[tuple[int, int]] = Channel(capacity, scope=scope, deadline_s=WAIT_S)
        received: list[list[tuple[int, int]]] = [[] for _ in range(receivers)]
        left = threading.Barrier(senders)

        def send(sender: int) -> None:
            for k in range(items):
                channel.put((sender, k))
            left.wait(WAIT_S)
            channel.close()

        for r in range(receivers):
            scope.go(f"receiver{r}", lambda r=r: received[r].extend(channel))
        for s in range(senders):
            scope.go(f"sender{s}", lambda s=s: send(s))
        finish(scope)
        assert scope.error is None
        assert Counter(item for part in received for item in part) == Counter(
            (s, k) for s in range(senders) for k in range(items)
        )
        for part in received:  # one receiver sees one sender's items in order
            for s in range(senders):
                own = [k for sender, k in part if sender == s]
                assert own == sorted(own)

    def test_capacity_is_never_exceeded(self) -> None:
        channel: Channel[int] = Channel(3)
        for k in range(3):
            channel.put(k)
        with pytest.raises(Stalled, match="full"):
            channel.put(3, timeout_s=0.01)
        assert len(channel) == 3

    def test_a_refused_item_was_not_taken(self) -> None:
        channel: Channel[int] = Channel(1)
        channel.put(0)
        with pytest.raises(Stalled):
            channel.put(1, timeout_s=0.0)
        channel.close()
        assert list(channel) == [0]

    @settings(max_examples=15, deadline=None)
    @given(timeouts=st.lists(st.sampled_from([0.0, 0.001, 0.005]), min_size=2, max_size=5), items=st.integers(1, 40))
    def test_timeouts_lose_no_wake_up(self, timeouts: list[float], items: int) -> None:
        """Receivers that give up and come back still drain everything."""
        scope = Scope()
        channel: Channel[int] = Channel(2, scope=scope, deadline_s=WAIT_S)
        received: list[int] = []

        def receive(timeout_s: float) -> None:
            while True:
                try:
                    received.append(channel.get(timeout_s))
                except Stalled:
                    continue
                except Closed:
                    return

        def send() -> None:
            for k in range(items):
                channel.put(k)
            channel.close()

        for i, timeout_s in enumerate(timeouts):
            scope.go(f"receiver{i}", lambda t=timeout_s: receive(t))
        scope.go("sender", send)
        finish(scope)
        assert sorted(received) == list(range(items))


class TestClose:
    def test_items_inside_are_delivered_before_the_end(self) -> None:
        """Fails when `get` looks at `_closed` before `_items`."""
        channel: Channel[int] = Channel(4)
        for k in range(4):
            channel.put(k)
        channel.close()
        assert list(channel) == [0, 1, 2, 3]
        with pytest.raises(Closed, match="drained"):
            channel.get()

    def test_put_after_close_is_refused(self) -> None:
        channel: Channel[int] = Channel(1)
        channel.close()
        channel.close()
        with pytest.raises(Closed):
            channel.put(1)

    def test_close_wakes_every_waiter(self) -> None:
        """Fails when `close` notifies one waiter only."""
        scope = Scope()
        channel: Channel[int] = Channel(1, scope=scope, deadline_s=WAIT_S)
        for r in range(5):
            scope.go(f"receiver{r}", lambda: list(channel) and None)
        channel.close()
        finish(scope)
        assert scope.error is None

    def test_a_blocked_sender_learns_of_the_close(self) -> None:
        scope = Scope()
        channel: Channel[int] = Channel(1, scope=scope, deadline_s=WAIT_S)
        channel.put(0)
        scope.go("sender", lambda: channel.put(1))
        channel.close()
        finish(scope)
        assert isinstance(scope.error, StageError)
        assert isinstance(scope.error.cause, Closed)


class TestCancel:
    @settings(max_examples=20, deadline=None)
    @given(senders=st.integers(1, 4), receivers=st.integers(1, 4), after=st.integers(0, 20))
    def test_nothing_hangs_and_nothing_doubles(self, senders: int, receivers: int, after: int) -> None:
        """Fails when `cancel` notifies only one of the two conditions."""
        scope = Scope()
        channel: Channel[int] = Channel(2, scope=scope, deadline_s=WAIT_S)
        received: list[int] = []
        reached = threading.Event()

        def send(sender: int) -> None:
            k = sender
            while True:
                channel.put(k)
                k += senders

        def receive() -> None:
            for item in channel:
                received.append(item)
                if len(received) >= after:
                    reached.set()

        for s in range(senders):
            scope.go(f"sender{s}", lambda s=s: send(s))
        for r in range(receivers):
            scope.go(f"receiver{r}", receive)
        assert after == 0 or reached.wait(WAIT_S)
        scope.cancel()
        finish(scope)
        assert scope.error is None
        assert len(received) == len(set(received))

    def test_what_is_inside_is_dropped(self) -> None:
        channel: Channel[int] = Channel(2)
        channel.put(1)
        channel.cancel()
        with pytest.raises(Cancelled):
            channel.get()
        assert len(channel) == 0

    def test_a_channel_made_after_the_cancel_is_cancelled(self) -> None:
        scope = Scope()
        scope.cancel()
        channel: Channel[int] = Channel(1, scope=scope)
        with pytest.raises(Cancelled):
            channel.get()


class TestScope:
    def test_the_first_exception_cancels_all_and_is_the_one_reported(self) -> None:
        """Fails when `fail` lets a later exception overwrite the first."""
        scope = Scope()
        channel: Channel[int] = Channel(1, scope=scope, deadline_s=WAIT_S)

        def echo() -> None:
            try:
                channel.get()
            except Cancelled:
                raise RuntimeError("an echo of the first") from None

        def first() -> None:
            raise KeyError("the cause")

        for k in range(3):
            scope.go(f"echo{k}", echo)
        scope.go("culprit", first)
        finish(scope)
        assert scope.error is not None
        assert scope.error.stage == "culprit"
        assert isinstance(scope.error.cause, KeyError)
        assert len(scope.later_errors) == 3

    def test_cancelled_threads_are_no_failure(self) -> None:
        scope = Scope()
        channel: Channel[int] = Channel(1, scope=scope, deadline_s=WAIT_S)
        scope.go("waiter", lambda: channel.get() and None)
        scope.cancel()
        finish(scope)
        assert scope.error is None

    def test_waiting_has_a_deadline(self) -> None:
        scope = Scope()
        release = threading.Event()
        scope.go("slow", lambda: release.wait(WAIT_S) and None)
        assert not scope.wait(0.01)
        assert scope.alive() == ["slow"]
        release.set()
        finish(scope)

    def test_a_stalled_wait_names_its_channel(self) -> None:
        scope = Scope()
        channel: Channel[int] = Channel(1, name="target0 -> drafter1", scope=scope, deadline_s=0.01)
        scope.go("drafter1", lambda: channel.get() and None)
        finish(scope)
        assert scope.error is not None
        assert "target0 -> drafter1" in str(scope.error)
        assert scope.error.stage == "drafter1"

    def test_a_name_is_used_once(self) -> None:
        scope = Scope()
        scope.go("one", lambda: None)
        with pytest.raises(ValueError):
            scope.go("one", lambda: None)
