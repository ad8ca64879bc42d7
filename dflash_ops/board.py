"""`fab tensorboard` from the operator's side: a port here, each request carried to the target and back."""

from __future__ import annotations

import base64
import http.client
import http.server
import io
import threading
from collections.abc import Callable
from typing import Any

from dflash_ops.agent import records, wire
from dflash_ops.agent.board import BoardEnd, BoardRequest, ExchangeEnd, ExchangeRequest
from dflash_ops.errors import AgentFailed, OpsError, UsageError
from dflash_ops.remote import Remote, raise_agent_error

START_S = 120.0
SILENCE_S = 15.0
EXCHANGE_S = 90.0
AT_ONCE = 4
"""Requests under way at a time: an sshd allows ten sessions."""
HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "proxy-connection"}
)


def show(holder: Remote, carrier: Remote, run_id: str, port: int, say: Callable[[str], None]) -> BoardEnd:
    """Serve until TensorBoard ends. `holder` keeps it alive; `carrier`, open already, takes the requests."""
    with holder.stream("tensorboard", BoardRequest(run_id)) as (stream, reader):
        server: http.server.ThreadingHTTPServer | None = None

        def silence() -> float:
            return START_S if server is None else SILENCE_S

        try:
            for event in holder.events(stream, reader, silence):
                if isinstance(event, wire.Progress):
                    server = _serve(carrier, int(event.text), port)
                    say(f"http://127.0.0.1:{server.server_address[1]}/ (Ctrl-C ends it)")
                elif isinstance(event, wire.Answer):
                    return records.load(BoardEnd, event.result)
        finally:
            if server is not None:
                server.shutdown()
                server.server_close()
    raise AgentFailed("the target stopped sending")


def _serve(carrier: Remote, remote_port: int, port: int) -> http.server.ThreadingHTTPServer:
    gate = threading.Semaphore(AT_ONCE)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def do_GET(self) -> None:
            self._carry()

        def do_POST(self) -> None:
            self._carry()

        def log_message(self, format: str, *args: Any) -> None:
            """The terminal stays quiet."""

        def _carry(self) -> None:
            try:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                raw = request_bytes(self.command, self.path, dict(self.headers.items()), body, remote_port)
                with gate:
                    answer = parse(fetch(carrier, remote_port, raw))
            except (OpsError, http.client.HTTPException, ValueError) as error:
                self.send_error(502, "the target did not answer", str(error))
                return
            self.send_response(answer.status)
            body = answer.read()
            for name, value in answer.getheaders():
                if name.lower() not in HOP_BY_HOP | {"content-length"}:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(f"port {port} cannot be used here", why=why, hint="--port N") from None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="tensorboard", daemon=True).start()
    return server


def request_bytes(method: str, path: str, headers: dict[str, str], body: bytes, port: int) -> bytes:
    """The request as TensorBoard shall see it: its own host, one exchange a connection."""
    if not path.startswith("/") or any(ord(char) < 33 for char in path):
        raise ValueError(f"a path like {path!r} is not carried")
    kept = {
        name: value
        for name, value in headers.items()
        if name.lower() not in HOP_BY_HOP | {"host", "accept-encoding", "origin"}
    }
    kept |= {"Host": f"127.0.0.1:{port}", "Connection": "close", "Content-Length": str(len(body))}
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in kept.items())
    return head.encode("latin-1", "replace") + b"\r\n" + body


def fetch(carrier: Remote, port: int, raw: bytes) -> bytes:
    """One exchange through the route."""
    pieces: list[bytes] = []
    request = ExchangeRequest(port, base64.b64encode(raw).decode())
    with carrier.stream("http", request) as (stream, reader):
        while True:
            piece = stream.read(EXCHANGE_S)
            if not piece:
                raise AgentFailed("the target cut the answer off")
            for event in reader.feed(piece):
                if isinstance(event, wire.Data):
                    pieces.append(event.payload)
                elif isinstance(event, wire.Answer):
                    raise_agent_error(event)
                    records.load(ExchangeEnd, event.result)
                    return b"".join(pieces)


class _Bytes:
    """What http.client wants of a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def parse(raw: bytes) -> http.client.HTTPResponse:
    """Raw bytes as a response, body unread."""
    response = http.client.HTTPResponse(_Bytes(raw))  # type: ignore[arg-type]  # only makefile is used
    response.begin()
    return response
