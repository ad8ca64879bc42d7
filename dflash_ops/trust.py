"""`fab trust`: see a host's key, compare its fingerprint, and only then write it to known_hosts.

Fetching the key proves nothing: whoever sits in between shows theirs. What proves it is the comparison with a
fingerprint that came another way (the host's own console: `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub`).
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import fabric
import paramiko

from dflash_ops.errors import HostKeyChanged, HostKeyRefused, OpsError
from dflash_ops.named_file import require_regular
from dflash_ops.settings import Ssh
from dflash_ops.transport.link import connection, explain_connect, fingerprint, verify_keys, within


@dataclass(frozen=True, slots=True)
class HostKey:
    """A key as shown by a host. `name` is the host as known_hosts writes it: `host` or `[host]:port`."""

    name: str
    kind: str
    base64: str
    fingerprint: str

    @property
    def line(self) -> str:
        return f"{self.name} {self.kind} {self.base64}"


@dataclass(frozen=True, slots=True)
class Known:
    """What known_hosts says about a host."""

    path: Path
    keys: tuple[tuple[str, str], ...]
    """(kind, base64) of each."""


def fetch(ssh: Ssh) -> HostKey:
    """The key that the host shows now, of the kind that is known already if one is. Nothing is stored or believed."""
    made = connection(ssh)
    name = made.host if made.port == 22 else f"[{made.host}]:{made.port}"
    preferred = [kind for kind, _ in known(ssh, name).keys]
    if isinstance(made.gateway, fabric.Connection):
        verify_keys(made.gateway, _path(ssh))  # the way there must be trusted already
    found: list[paramiko.PKey] = []

    def ask() -> None:
        way = (
            made.open_gateway()
            if made.gateway
            else socket.create_connection((made.host, made.port), ssh.connect_timeout)
        )
        with contextlib.closing(paramiko.Transport(way)) as transport:
            options = transport.get_security_options()
            kinds = [kind for kind in options.key_types if _kind(kind) in preferred]
            options.key_types = [*kinds, *(kind for kind in options.key_types if kind not in kinds)]
            transport.banner_timeout = ssh.connect_timeout
            transport.start_client(timeout=ssh.connect_timeout)
            found.append(transport.get_remote_server_key())

    outcome = within(4.0 * ssh.connect_timeout, ask, on_late=made.close)
    if outcome is None:
        raise explain_connect(ssh.host, TimeoutError())
    made.close()
    if outcome.error is not None:
        raise explain_connect(ssh.host, outcome.error) from None
    key = found[0]
    return HostKey(name, key.get_name(), key.get_base64(), fingerprint(key))


def known(ssh: Ssh, name: str) -> Known:
    """The keys that known_hosts has for this name."""
    path = _path(ssh)
    keys = []
    for line in _lines(path):
        words = line.split()
        if len(words) >= 3 and _names(words[0], name):
            keys.append((words[1], words[2]))
    return Known(path, tuple(keys))


def check(shown: HostKey, on_file: Known, expected: str, *, replace: bool) -> bool:
    """Whether the key is on file already; raises when it must not be stored.

    `expected` is the fingerprint to compare with; empty: the operator compares by eye.
    """
    if expected and _fingerprint(expected) != shown.fingerprint:
        raise HostKeyRefused(
            f"{shown.name}: the fingerprint does not match; nothing was stored",
            why=f"the host shows {shown.fingerprint}, expected is {_fingerprint(expected)}",
            hint="check the fingerprint on the host's console; if that is right, someone sits in between",
        )
    if (shown.kind, shown.base64) in on_file.keys:
        return True
    if on_file.keys and not replace:
        raise HostKeyChanged(
            f"{shown.name}: the host key has CHANGED; nothing was stored",
            why=f"it shows {shown.kind} {shown.fingerprint}; {on_file.path} holds another",
        )
    return False


def store(shown: HostKey, path: Path) -> None:
    """Write the key; what the file held for this name before goes, everything else stays as it is."""
    kept: list[str] = []
    for line in _lines(path):
        words = line.split()
        if len(words) >= 3 and _names(words[0], shown.name):
            others = [part for part in words[0].split(",") if not _names(part, shown.name)]
            if not others:
                continue
            line = " ".join([",".join(others), *words[1:]])
        kept.append(line)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write("".join(f"{line}\n" for line in [*kept, shown.line]).encode("utf-8", "surrogateescape"))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OpsError(f"{path} cannot be written", why=error.strerror or "", hint="check its directory") from None


def _path(ssh: Ssh) -> Path:
    # A link is followed, so that the file it names is replaced and not the link.
    return Path(ssh.known_hosts).expanduser().resolve()


def _lines(path: Path) -> list[str]:
    try:
        text = require_regular(path).read_bytes().decode("utf-8", "surrogateescape").removesuffix("\n")
        return text.split("\n") if text else []  # not splitlines: it knows more line ends than OpenSSH does
    except FileNotFoundError:
        return []
    except OSError as error:
        raise HostKeyRefused(f"{path} cannot be read", why=error.strerror or "") from None


def _names(field: str, name: str) -> bool:
    """Whether a names field of known_hosts means this host; hashed names included. Markers (@revoked) never do."""
    for part in field.split(","):
        if part == name:
            return True
        if part.startswith("|1|"):
            with contextlib.suppress(ValueError):  # not a well-formed hash
                if paramiko.HostKeys.hash_host(name, part) == part:
                    return True
    return False


def _kind(algorithm: str) -> str:
    """The key type behind a signature algorithm: rsa-sha2-512 signs with an ssh-rsa key."""
    return "ssh-rsa" if algorithm.startswith("rsa-sha2-") else algorithm


def _fingerprint(text: str) -> str:
    """As OpenSSH prints it; people also paste it without the prefix or with padding."""
    text = text.strip().rstrip("=")
    return text if text.startswith("SHA256:") else f"SHA256:{text}"
