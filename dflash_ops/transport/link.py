"""One SSH connection: opened when first needed, again after a drop, and never waited on without a limit.

Fabric's Connection reads the configuration (ssh_config, ProxyJump, agent) and connects; what it leaves open is closed
here: host keys are loaded and unknown ones refused on every hop, and each step has a deadline. Paramiko can block for
ever on a frozen peer in places that take no time limit (the reply to an exec request, a write into a full socket), so
such steps run under `Link.bounded`, which cuts the connection when time is up; that wakes every waiter.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fabric
import paramiko

from dflash_ops.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    HostKeyChanged,
    HostKeyRefused,
    HostsFileError,
    HostUnreachable,
    OpsError,
)
from dflash_ops.named_file import require_regular
from dflash_ops.settings import Ssh
from dflash_ops.transport.channel import ordered

KEEPALIVE_S = 15
CONNECT_S = 0.5
"""With less time left, no connection is made: a quick one would run the command after its deadline."""
CHANNELS = 6  # sshd's MaxSessions is 10 by default; others may share the connection's user
NO_ROOM = (2, 4)
"""Refusals of a session (RFC 4254, 5.1): connect failed, which is sshd's word for MaxSessions; resource shortage."""
NO_ROOM_S = 3.0
"""How long they are not believed: sshd may hear of a new session before it has dealt with the end of old ones."""
SYSTEM_KNOWN_HOSTS = Path("/etc/ssh/ssh_known_hosts")

# Without a handler of its own Paramiko's thread prints tracebacks to the operator's terminal.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class UnknownKey(paramiko.SSHException):
    """Raised inside the handshake, before anything of ours was sent."""

    def __init__(self, hostname: str, key: paramiko.PKey) -> None:
        super().__init__(hostname)
        self.hostname = hostname
        self.key = key


class _RefuseUnknown(paramiko.MissingHostKeyPolicy):
    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        raise UnknownKey(hostname, key)


def fingerprint(key: paramiko.PKey) -> str:
    """The key's fingerprint as OpenSSH prints it: SHA256:base64."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")


def connection(ssh: Ssh) -> fabric.Connection:
    """Fabric's view of the host: hosts.yaml over ssh_config over defaults. Nothing is opened yet."""
    limits = {"banner_timeout": ssh.connect_timeout, "auth_timeout": ssh.connect_timeout}
    kwargs: dict[str, object] = {**limits, "channel_timeout": ssh.connect_timeout}
    if ssh.identity is not None:
        identity = Path(ssh.identity).expanduser()
        if not identity.is_file():
            raise AuthenticationFailed(f"{ssh.host}: the key file {identity} does not exist")
        kwargs["key_filename"] = str(identity)
    if ssh.config:
        require_regular(Path(ssh.config).expanduser(), HostsFileError)
    try:
        config = fabric.Config(
            runtime_ssh_path=str(Path(ssh.config).expanduser()) if ssh.config else None,
            # At this level, and not as arguments, so that a ProxyJump's own connections have them too.
            overrides={"connect_kwargs": kwargs, "timeouts": {"connect": ssh.connect_timeout}},
        )
    except (OSError, paramiko.SSHException) as error:
        raise HostsFileError(f"ssh_config cannot be read: {error}") from None
    settings = config.base_ssh_config.lookup(ssh.host)
    # `none` switches an inherited jump off; Fabric would take it for a host's name.
    jumps = (settings.get("proxyjump"), settings.get("proxycommand"))
    direct = not [jump for jump in jumps if jump and jump.lower() != "none"]
    return fabric.Connection(
        ssh.host,
        user=ssh.user,
        port=ssh.port,
        config=config,
        gateway=False if direct else None,
        connect_timeout=ssh.connect_timeout,
    )


def verify_keys(made: fabric.Connection, known_hosts: Path) -> None:
    """Make every hop of the connection check its host key."""
    require_regular(known_hosts)
    hop: object = made
    while isinstance(hop, fabric.Connection):
        hop.client.set_missing_host_key_policy(_RefuseUnknown())
        try:
            if SYSTEM_KNOWN_HOSTS.exists():
                hop.client.load_system_host_keys(str(SYSTEM_KNOWN_HOSTS))
            if known_hosts.exists():
                hop.client.load_host_keys(str(known_hosts))
        except Exception as error:  # noqa: BLE001  # InvalidHostKey and codec errors share no base class
            raise HostKeyRefused(f"{known_hosts} cannot be read", why=str(error)) from None
        hop = hop.gateway


class Link:
    """The connection to one host, shared by all commands; safe to use from several threads."""

    def __init__(self, ssh: Ssh) -> None:
        self._ssh = ssh
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(CHANNELS)
        self._transport: paramiko.Transport | None = None
        self._connection: fabric.Connection | None = None
        self.label = f"{ssh.user}@{ssh.host}" if ssh.user else ssh.host

    @property
    def alive(self) -> bool:
        """Whether the connection is up, as far as this side knows."""
        return self._transport is not None and self._transport.is_active()

    @contextlib.contextmanager
    def channel(self, ends_at: float) -> Iterator[paramiko.Channel]:
        """A fresh session channel; a connection that turns out dead is opened anew, once."""
        if not self._slots.acquire(timeout=max(0.0, ends_at - time.monotonic())):
            raise DeadlineExceeded(f"{self.label}: {CHANNELS} commands already run over this connection")
        try:
            try:
                fresh = not self.alive
                channel = self._open_channel(ends_at)
            except _Dead:
                if fresh:
                    raise
                channel = self._open_channel(ends_at)
            try:
                yield channel
            finally:
                with self.bounded(1.0), contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                    channel.close()
        finally:
            self._slots.release()

    def _open_channel(self, ends_at: float) -> paramiko.Channel:
        patient_until = min(ends_at, time.monotonic() + NO_ROOM_S)
        while True:
            transport = self._ready(ends_at)
            left = min(ends_at - time.monotonic(), self._ssh.connect_timeout)
            try:
                with self.bounded(left + 1.0):
                    return ordered(transport.open_session(timeout=max(0.1, left)))
            except paramiko.ChannelException as error:
                if error.code not in NO_ROOM or time.monotonic() >= patient_until:
                    raise HostUnreachable(f"{self.label}: the host refuses another session", why=error.text) from None
            except (paramiko.SSHException, EOFError, OSError) as error:
                self.cut()
                raise _Dead(f"{self.label}: the connection does not answer", why=str(error)) from None
            time.sleep(0.1)

    def _ready(self, ends_at: float) -> paramiko.Transport:
        """The open transport. One thread opens it, the others wait for that."""
        if not self._lock.acquire(timeout=max(0.0, ends_at - time.monotonic())):
            raise HostUnreachable(f"{self.label}: no connection in time")
        try:
            if self._transport is None or not self._transport.is_active():
                self._transport = self._connect(ends_at)
            return self._transport
        finally:
            self._lock.release()

    def _connect(self, ends_at: float) -> paramiko.Transport:
        left = ends_at - time.monotonic()
        if left < CONNECT_S:
            raise HostUnreachable(f"{self.label}: no connection in time", why="the time was over before it was made")
        made = connection(self._ssh)
        verify_keys(made, Path(self._ssh.known_hosts).expanduser())
        # TCP, banner, key exchange and authentication each have connect_timeout; a ProxyJump doubles the steps.
        limit = min(4.0 * self._ssh.connect_timeout, left)
        outcome = within(limit, made.open, on_late=made.close)
        if outcome is None:
            raise HostUnreachable(
                f"{self.label}: no SSH session within {limit:.0f} s",
                why="it accepts the connection and does not answer",
            )
        if outcome.error is not None:
            made.close()
            raise explain_connect(self.label, outcome.error) from None
        transport: paramiko.Transport = made.transport
        transport.set_keepalive(KEEPALIVE_S)
        self._connection = made
        return transport

    @contextlib.contextmanager
    def bounded(self, seconds: float) -> Iterator[None]:
        """Cut the connection if the block takes longer: what blocks inside it then ends with an error."""
        timer = threading.Timer(max(0.0, seconds), self.cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def cut(self) -> None:
        """Drop the connection without a word to the peer; the next command opens a new one."""
        transport, self._transport = self._transport, None
        if transport is not None:
            # The socket first: it wakes a writer that holds Paramiko's send lock.
            with contextlib.suppress(OSError, AttributeError):
                transport.sock.shutdown(socket.SHUT_RDWR)
            transport.packetizer.close()
            within(2.0, transport.close)

    def close(self) -> None:
        """Close in good order, but not for long."""
        made, self._connection = self._connection, None
        self._transport = None
        if made is not None and within(2.0, made.close) is None and made.transport is not None:
            made.transport.packetizer.close()


class _Dead(HostUnreachable):
    """The connection was believed to be up and is not."""


class Outcome:
    """How a function ended that ran in a thread of its own."""

    error: BaseException | None = None


def within(
    seconds: float, function: Callable[[], object], on_late: Callable[[], object] | None = None
) -> Outcome | None:
    """Run it in a daemon thread; None when it takes longer. It then runs on, and `on_late` follows it."""
    outcome = Outcome()
    late = threading.Event()

    def work() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  # handed to the caller's thread
            outcome.error = error
        if late.is_set() and on_late is not None:
            with contextlib.suppress(Exception):
                on_late()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        late.set()
        return None
    return outcome


def explain_connect(label: str, error: BaseException) -> OpsError:
    """The layer that failed while connecting."""
    if isinstance(error, UnknownKey):
        return HostKeyRefused(f"{error.hostname}: unknown host key", why=f"it shows {_shown(error.key)}")
    if isinstance(error, paramiko.BadHostKeyException):
        return HostKeyChanged(
            f"{error.hostname}: the host key has CHANGED",
            why=f"it shows {_shown(error.key)}, known is {_shown(error.expected_key)}",
        )
    if isinstance(error, paramiko.PasswordRequiredException):
        return AuthenticationFailed(f"{label}: the key file has a passphrase", hint="ssh-add it first")
    if isinstance(error, paramiko.AuthenticationException):
        return AuthenticationFailed(f"{label}: the host refuses our keys", why=str(error))
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        reasons = {str(reason) for reason in error.errors.values()}
        return HostUnreachable(f"{label}: cannot connect", why=", ".join(sorted(reasons)))
    if isinstance(error, socket.gaierror):
        # `-H` takes a name that hosts.yaml lacks for a host, so this may be a target that was never written down.
        hint = "check the name and the network; a target of your own must stand in hosts.yaml first"
        return HostUnreachable(f"{label}: unknown host name", why=str(error.strerror), hint=hint)
    if isinstance(error, TimeoutError):
        return HostUnreachable(f"{label}: no answer in time", why="the address or a firewall swallows packets")
    if isinstance(error, paramiko.SSHException) and "authentication methods" in str(error):
        return AuthenticationFailed(f"{label}: no key to offer", why=str(error))
    if isinstance(error, (paramiko.SSHException, EOFError)):
        return HostUnreachable(f"{label}: no SSH session", why=str(error) or "the host closed the connection")
    if isinstance(error, OSError):
        return HostUnreachable(f"{label}: cannot connect", why=str(error.strerror or error))
    if isinstance(error, ValueError):  # a key file that is none
        return AuthenticationFailed(f"{label}: a key cannot be read", why=str(error))
    raise error


def _shown(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {fingerprint(key)}"
