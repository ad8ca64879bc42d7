"""A route that lets so many bytes through and then holds: what happens "in the middle" is then a state, not a moment.

A relay between a client and a server on this machine. The client's connection stays up while the valve holds, and its
end is noticed and handed on, as by a real router: what was held is lost.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator

PIECE = 1 << 16
LOOK_S = 0.2
"""How often a held connection looks whether the valve was opened; nobody waits for it but the ends of tests."""


class Valve:
    """Relays connections to `server`; of what clients send, `limit` bytes in all pass, until it is opened."""

    def __init__(self, server: tuple[str, int], limit: int) -> None:
        self.passed = 0
        self._server = server
        self._limit: float = limit
        self._changed = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server((server[0], 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def open(self) -> None:
        """From now on everything passes."""
        self._limit = float("inf")

    def close(self) -> None:
        """End the listener and every connection."""
        for one in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            self._sockets += [client, server]
            threading.Thread(target=self._forth, args=(client, server), daemon=True).start()
            threading.Thread(target=self._back, args=(client, server), daemon=True).start()

    def _forth(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while self._may_pass(client):
                piece = client.recv(int(min(PIECE, self._limit - self.passed)))
                if not piece:
                    break
                server.sendall(piece)
                with self._changed:
                    self.passed += len(piece)
        _end(server)

    def _may_pass(self, client: socket.socket) -> bool:
        """Wait while the valve holds; False when the client is gone meanwhile."""
        waiting = select.poll()
        waiting.register(client, select.POLLRDHUP)  # its end, also behind bytes that are not read
        while self.passed >= self._limit:
            if waiting.poll(LOOK_S * 1000):
                return False
        return True

    def _back(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := server.recv(PIECE):
                client.sendall(piece)
        _end(client)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def valve(server: tuple[str, int], limit: int) -> Iterator[Valve]:
    made = Valve(server, limit)
    try:
        yield made
    finally:
        made.close()
