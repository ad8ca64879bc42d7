"""A Paramiko channel that sends nothing behind its own close.

Paramiko builds a message under the channel's lock and sends it after letting go. Meanwhile another thread may answer
the host's close: data or an end of input then reaches a host that has forgotten the channel, and OpenSSH ends the whole
connection over it, with everything else that runs there ("packet referred to nonexistent channel"). A command that is
over before its input is enough.

Here a close that comes between waits until what is being sent has left; whoever sends it then sends the close as well.
Nobody blocks for it: Paramiko's reading thread must not, a new exchange of keys would stand still.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import paramiko


class OrderedChannel(paramiko.Channel):
    """Made of a channel that Paramiko has opened, by `ordered`."""

    _sending = 0
    """Messages on their way; guarded by `lock`, as is the next."""
    _behind: tuple[Any, ...] = ()
    """Messages of the close that wait for them."""

    def shutdown(self, how: int) -> None:
        """See `paramiko.Channel.shutdown`."""
        with self._on_its_way():
            super().shutdown(how)

    def _send(self, data: Any, message: Any) -> Any:
        with self._on_its_way():
            return super()._send(data, message)  # type: ignore[misc]  # the stubs leave it out

    def _close_internal(self) -> Any:
        # With the lock held: by `close`, or as the host's own close is answered.
        messages = super()._close_internal()  # type: ignore[misc]  # as above
        if not self._sending:
            return messages
        self._behind += messages
        return None, None

    @contextlib.contextmanager
    def _on_its_way(self) -> Iterator[None]:
        with self.lock:
            self._sending += 1
        try:
            yield
        finally:
            behind: tuple[Any, ...] = ()
            with self.lock:
                self._sending -= 1
                if not self._sending:
                    behind, self._behind = self._behind, ()
            transport: Any = self.transport  # there is one for as long as a channel lives
            for message in behind:
                if message is not None:
                    transport._send_user_message(message)


def ordered(channel: paramiko.Channel) -> OrderedChannel:
    """The same channel; Paramiko makes them itself, so the class is changed afterwards."""
    channel.__class__ = OrderedChannel
    assert isinstance(channel, OrderedChannel)
    return channel
