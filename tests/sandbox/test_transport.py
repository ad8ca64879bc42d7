"""Bytes, arguments, deadlines and failures over real SSH, and over SSH and pct into a real container.

Shown able to fail: with `render` joining by spaces, with the reply to exec awaited without a limit, with a timed-out
connection kept, and with the exit status -1 passed on as a number, the tests of these went red.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_ops.agent.process import command_lines
from dflash_ops.errors import (
    AgentFailed,
    AuthenticationFailed,
    ContainerMissing,
    ContainerStopped,
    DeadlineExceeded,
    HostKeyChanged,
    HostKeyRefused,
    HostUnreachable,
    OpsError,
)
from dflash_ops.settings import Ssh
from dflash_ops.transport.base import Completed, Transport
from dflash_ops.transport.pct import PctTransport
from dflash_ops.transport.ssh import SshTransport
from tests.sandbox.box import Box, send
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.sandbox
PYTHON = "/usr/bin/python3"


def ssh_settings(box: Box, known_hosts: Path, **changes: object) -> Ssh:
    if not known_hosts.exists():
        known_hosts.write_text(box.sshd.known_hosts_line())
    config = known_hosts.with_name("ssh_config")
    config.touch()
    values: dict[str, object] = {
        "host": box.sshd.address,
        "port": box.sshd.port,
        "user": "root",
        "identity": str(box.sshd.identity),
        "known_hosts": str(known_hosts),
        "config": str(config),
        "connect_timeout": 30,
    }
    return Ssh.model_validate({**values, **changes})


@pytest.fixture
def ssh(box: Box, tmp_path: Path) -> Iterator[SshTransport]:
    transport = SshTransport(ssh_settings(box, tmp_path / "known_hosts"))
    yield transport
    transport.close()


@pytest.fixture
def pct(box: Box, ssh: SshTransport) -> PctTransport:
    return PctTransport(ssh, 200, pct=str(box.pct))


@pytest.fixture(params=["ssh", "pct"])
def transport(request: pytest.FixtureRequest) -> Transport:
    made: Transport = request.getfixturevalue(request.param)
    return made


def said(transport: Transport, *argv: str, stdin: bytes = b"", deadline: float = PATIENCE_S) -> Completed:
    return transport.call(argv, stdin=stdin, deadline=deadline)


class TestBytes:
    WORDS = (
        "a b",
        "'",
        '"',
        "$HOME",
        "`id`",
        ";reboot",
        "\n",
        "a\n\nb",
        "",
        "é☃",
        "--",
        "-e",
        "*",
        "\\",
        "!x",
        "~",
        "\x7f",
    )

    def test_arguments_arrive_byte_for_byte(self, transport: Transport) -> None:
        script = "import os, sys; sys.stdout.buffer.write(b'|'.join(map(os.fsencode, sys.argv[1:])))"
        words = [*self.WORDS, "".join(self.WORDS)]
        done = said(transport, PYTHON, "-c", script, *words)
        assert done.stdout.split(b"|") == [word.encode() for word in words]

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(words=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1, max_size=8))
    def test_any_arguments(self, pct: PctTransport, words: list[str]) -> None:
        script = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
        assert said(pct, PYTHON, "-c", script, *words).stdout.split(b"\0") == [word.encode() for word in words]

    def test_stdin_stdout_and_stderr(self, transport: Transport) -> None:
        data = os.urandom(20 << 20)
        script = "import sys; d = sys.stdin.buffer.read(); sys.stderr.write('e' * 5000); sys.stdout.buffer.write(d)"
        done = said(transport, PYTHON, "-c", script, stdin=data)
        assert done.stdout == data
        assert done.stderr == b"e" * 5000

    def test_more_stderr_than_any_window_does_not_block(self, transport: Transport) -> None:
        done = said(transport, PYTHON, "-c", "import sys; sys.stderr.write('e' * (8 << 20)); print('end')")
        assert done.stdout == b"end\n"
        assert 0 < len(done.stderr) <= 1 << 16

    def test_a_command_that_does_not_read_its_stdin(self, transport: Transport) -> None:
        done = said(transport, "/bin/echo", "done", stdin=bytes(8 << 20))
        assert (done.returncode, done.stdout) == (0, b"done\n")

    def test_an_iterator_as_stdin(self, transport: Transport) -> None:
        pieces = [os.urandom(100_000) for _ in range(30)]
        done = transport.call(["/usr/bin/sha256sum"], stdin=iter(pieces), deadline=PATIENCE_S)
        assert done.stdout.split()[0].decode() == hashlib.sha256(b"".join(pieces)).hexdigest()

    def test_an_iterator_that_fails_is_the_callers_error(self, transport: Transport) -> None:
        def failing() -> Iterator[bytes]:
            yield b"x"
            raise OSError(5, "the disk of the laptop")

        with pytest.raises(OSError, match="the disk of the laptop"):
            transport.call(["/bin/cat"], stdin=failing(), deadline=PATIENCE_S)

    def test_output_goes_to_the_sink_as_it_comes(self, transport: Transport) -> None:
        got: list[bytes] = []
        done = transport.call(["/bin/echo", "hi"], deadline=PATIENCE_S, on_stdout=got.append)
        assert (b"".join(got), done.stdout) == (b"hi\n", b"")


class TestExit:
    @pytest.mark.parametrize("code", [0, 1, 124, 127, 255])
    def test_codes(self, transport: Transport, code: int) -> None:
        assert said(transport, "/bin/sh", "-c", f"exit {code}").returncode == code

    def test_a_lost_link_is_no_code(self, box: Box, transport: Transport) -> None:
        seconds = f"6{time.monotonic_ns()}"  # names this one process

        def kill() -> None:
            wait_until(lambda: running("/bin/sleep", seconds), "the command runs")
            for pid in box.sshd.sessions():
                send(pid, signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        done = said(transport, "/bin/sleep", seconds)
        for pid in running("/bin/sleep", seconds):
            send(pid, signal.SIGKILL)
        assert done.returncode is None
        error = transport.explain(done)
        assert isinstance(error, HostUnreachable)
        assert "lost" in error.what
        assert said(transport, "/bin/echo", "again").stdout == b"again\n"  # it reconnects by itself


class TestEnvironment:
    def test_the_container_gets_a_clean_one(self, box: Box, pct: PctTransport) -> None:
        lines = said(pct, "/usr/bin/env").stdout.decode().splitlines()
        assert sorted(line.partition("=")[0] for line in lines) == ["HOME", "LANG", "PATH", "TERM", "USER"]

    def test_also_with_a_pct_without_keep_env(self, box: Box, ssh: SshTransport) -> None:
        box.settings(keep_env=False)
        for stdin in (b"x", iter([b"x"])):
            pct = PctTransport(ssh, 200, pct=str(box.pct), environment={"TERM": "dumb"})
            done = pct.call(["/bin/sh", "-c", "cat; env"], stdin=stdin, deadline=PATIENCE_S)
            lines = done.stdout[1:].decode().splitlines()
            assert (done.stdout[:1], "TERM=dumb" in lines) == (b"x", True)
            assert not [line for line in lines if line.startswith("SSH_")]

    def test_a_login_leaves_the_machine_s_own_home_alone(self, box: Box, ssh: SshTransport) -> None:
        assert said(ssh, "/usr/bin/printenv", "HOME").stdout.decode().strip() == str(box.sshd.home / "root")

    def test_it_runs_where_it_says(self, box: Box, pct: PctTransport) -> None:
        assert said(pct, "/bin/hostname").stdout == b"ct200\n"
        host = pct.host()
        assert host is not None
        assert said(host, "/bin/hostname").stdout != b"ct200\n"


class TestStream:
    def test_reads_as_it_comes_and_ends_with_the_caller(self, box: Box, transport: Transport) -> None:
        mark = f"mark{time.monotonic_ns()}"
        script = "import time, sys\nwhile True: print('x', flush=True); time.sleep(0.05)"
        words = (PYTHON, "-c", script, mark)
        with transport.stream(words) as stream:
            assert stream.read(PATIENCE_S)
            assert running(*words)
            assert stream.read(PATIENCE_S)
        wait_until(lambda: not running(*words), "the command has ended")

    def test_nothing_yet_and_the_end(self, transport: Transport) -> None:
        with transport.stream(["/bin/sh", "-c", "read line; echo $line; echo no >&2; exit 3"], stdin=b"") as stream:
            assert stream.read(0.1) is None  # stdin is held open
        with transport.stream(["/bin/sh", "-c", "read line; echo $line; echo no >&2; exit 3"], stdin=b"go\n") as stream:
            assert stream.read(PATIENCE_S) == b"go\n"
            assert stream.read(PATIENCE_S) == b""
            done = stream.end()
            assert (done.returncode, done.stderr) == (3, b"no\n")


class TestDeadline:
    def test_a_slow_command_is_ended_at_both_ends(self, box: Box, transport: Transport) -> None:
        said(transport, "/bin/true")  # the deadline is for the command, not for the handshake
        seconds = f"6{time.monotonic_ns()}"
        with pytest.raises(DeadlineExceeded):
            said(transport, "/bin/sleep", seconds, deadline=3.0)
        wait_until(lambda: not running("/bin/sleep", seconds), "the remote command has ended")

    def test_output_without_end(self, transport: Transport) -> None:
        said(transport, "/bin/true")
        with pytest.raises(DeadlineExceeded):
            transport.call(["/usr/bin/yes"], deadline=3.0, on_stdout=lambda _: None)

    def test_a_frozen_peer_before_the_call(self, box: Box, transport: Transport) -> None:
        said(transport, "/bin/true")
        with frozen(box):
            with pytest.raises((DeadlineExceeded, HostUnreachable)):
                said(transport, "/bin/true", deadline=3.0)
            # The connection stays frozen; the next command does not wait on it.
            assert said(transport, "/bin/echo", "again").stdout == b"again\n"

    def test_no_connection_is_made_when_the_time_is_over(self, box: Box, ssh: SshTransport) -> None:
        """Shown able to fail: with a tenth of a second granted to every connection, one was made."""
        before = box.sshd.log.count("Accepted publickey")
        with pytest.raises(HostUnreachable, match="no connection in time"):
            said(ssh, "/bin/true", deadline=0.0)
        assert not ssh.link.alive
        assert box.sshd.log.count("Accepted publickey") == before

    def test_after_a_deadline_the_next_command_has_a_fresh_connection(
        self, box: Box, transport: Transport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said(transport, "/bin/true")
        plain = paramiko.Channel.exec_command

        def freeze_after(channel: paramiko.Channel, command: str) -> None:
            plain(channel, command)
            for pid in box.sshd.sessions():
                send(pid, signal.SIGSTOP)

        try:
            with monkeypatch.context() as patch:
                patch.setattr(paramiko.Channel, "exec_command", freeze_after)
                with pytest.raises(DeadlineExceeded):
                    said(transport, "/bin/sleep", "30", deadline=2.0)
            # Less than connect_timeout: it would not have the time to find out that the old one is dead.
            assert said(transport, "/bin/echo", "again", deadline=25.0).stdout == b"again\n"
        finally:
            thaw(box)

    def test_a_peer_that_freezes_between_opening_and_exec(
        self, box: Box, transport: Transport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said(transport, "/bin/true")
        plain = paramiko.Channel.exec_command

        def freeze_first(channel: paramiko.Channel, command: str) -> None:
            for pid in box.sshd.sessions():
                send(pid, signal.SIGSTOP)
            plain(channel, command)

        monkeypatch.setattr(paramiko.Channel, "exec_command", freeze_first)
        try:
            with pytest.raises((DeadlineExceeded, HostUnreachable)):
                said(transport, "/bin/true", deadline=2.0)
        finally:
            thaw(box)

    def test_a_frozen_peer_in_the_middle_of_an_upload(self, box: Box, transport: Transport) -> None:
        said(transport, "/bin/true")

        def endless() -> Iterator[bytes]:
            for count in range(100_000):
                if count == 20:
                    for pid in box.sshd.sessions():
                        send(pid, signal.SIGSTOP)
                yield bytes(1 << 16)

        try:
            with pytest.raises(DeadlineExceeded):
                transport.call(["/usr/bin/sha256sum"], stdin=endless(), deadline=4.0)
        finally:
            thaw(box)

    def test_a_frozen_peer_in_the_middle_of_a_stream(self, box: Box, transport: Transport) -> None:
        with transport.stream(["/usr/bin/yes"]) as stream:
            assert stream.read(PATIENCE_S)
            with frozen(box):
                wait_until(lambda: stream.read(0.5) is None, "no more bytes")
                closing = threading.Thread(target=transport.close, daemon=True)
                closing.start()
                closing.join(PATIENCE_S)
                assert not closing.is_alive()

    def test_a_listener_that_never_answers(self, box: Box, tmp_path: Path) -> None:
        assert box.sshd.process is not None
        send(box.sshd.process.pid, signal.SIGSTOP)
        transport = SshTransport(ssh_settings(box, tmp_path / "known_hosts", connect_timeout=1))
        try:
            with pytest.raises(HostUnreachable):
                said(transport, "/bin/true")
        finally:
            send(box.sshd.process.pid, signal.SIGCONT)


class TestLayers:
    """Each failure names its layer."""

    def error(self, transport: Transport, *argv: str) -> OpsError:
        return transport.explain(said(transport, *(argv or ("/bin/false",))))

    def test_nobody_listens(self, box: Box, tmp_path: Path) -> None:
        transport = SshTransport(ssh_settings(box, tmp_path / "known_hosts", port=1))
        with pytest.raises(HostUnreachable, match="cannot connect"):
            said(transport, "/bin/true")

    def test_no_such_host(self, box: Box, tmp_path: Path) -> None:
        transport = SshTransport(ssh_settings(box, tmp_path / "known_hosts", host="no-such-host.invalid"))
        with pytest.raises(HostUnreachable, match="unknown host name") as refused:
            said(transport, "/bin/true")
        assert "hosts.yaml" in str(refused.value.hint)

    def test_a_key_that_is_not_authorised(self, box: Box, tmp_path: Path) -> None:
        transport = SshTransport(ssh_settings(box, tmp_path / "known_hosts", identity=str(box.sshd.home / "host_key")))
        with pytest.raises(AuthenticationFailed) as caught:
            said(transport, "/bin/true")
        assert caught.value.exit_code == 10

    def test_an_identity_that_does_not_exist(self, box: Box, tmp_path: Path) -> None:
        transport = SshTransport(ssh_settings(box, tmp_path / "known_hosts", identity="/no/such/key"))
        with pytest.raises(AuthenticationFailed, match="does not exist"):
            said(transport, "/bin/true")

    def test_unknown_key(self, box: Box, tmp_path: Path) -> None:
        (tmp_path / "known_hosts").write_text("# none\n")
        transport = SshTransport(ssh_settings(box, tmp_path / "known_hosts"))
        with pytest.raises(HostKeyRefused) as caught:
            said(transport, "/bin/true")
        assert not isinstance(caught.value, HostKeyChanged)
        assert box.sshd.fingerprint() in caught.value.why

    def test_changed_key(self, box: Box, tmp_path: Path) -> None:
        other = box.sshd.known_hosts_line().split()[0] + " " + (box.sshd.home / "user_key.pub").read_text()
        (tmp_path / "known_hosts").write_text(other)
        transport = SshTransport(ssh_settings(box, tmp_path / "known_hosts"))
        with pytest.raises(HostKeyChanged, match="CHANGED"):
            said(transport, "/bin/true")

    def test_no_pct(self, ssh: SshTransport) -> None:
        error = self.error(PctTransport(ssh, 200, pct="/usr/sbin/no-pct"))
        assert isinstance(error, ContainerMissing)
        assert "/usr/sbin/no-pct" in error.what

    def test_no_such_container(self, box: Box, ssh: SshTransport) -> None:
        error = self.error(PctTransport(ssh, 999, pct=str(box.pct)))
        assert isinstance(error, ContainerMissing)
        assert "999" in error.what

    def test_a_stopped_container(self, box: Box, pct: PctTransport) -> None:
        box.container.stop()
        error = self.error(pct)
        assert isinstance(error, ContainerStopped)
        assert "pct start 200" in error.hint

    def test_a_container_that_stops_under_the_command(self, box: Box, pct: PctTransport) -> None:
        said(pct, "/bin/true")
        seconds = f"6{time.monotonic_ns()}"

        def stop() -> None:
            wait_until(lambda: running("/bin/sleep", seconds), "the command runs")
            box.container.stop()

        stopper = threading.Thread(target=stop, daemon=True)
        stopper.start()
        done = said(pct, "/bin/sleep", seconds)
        stopper.join(PATIENCE_S)
        assert isinstance(pct.explain(done), ContainerStopped)

    def test_a_program_that_is_missing(self, transport: Transport) -> None:
        error = self.error(transport, "/opt/no/python", "-c", "pass")
        assert isinstance(error, AgentFailed)
        assert "/opt/no/python" in error.what

    def test_a_command_that_fails(self, transport: Transport) -> None:
        error = self.error(transport, "/bin/sh", "-c", "echo out of luck >&2; exit 9")
        assert isinstance(error, AgentFailed)
        assert (error.why, "exit code 9" in error.what) == ("out of luck", True)

    def test_pct_not_as_root(self, box: Box, ssh: SshTransport) -> None:
        box.settings(fail="please run as root")
        error = self.error(PctTransport(ssh, 200, pct=str(box.pct)))
        assert isinstance(error, ContainerMissing)
        assert "root" in error.why


class TestThreads:
    def test_many_calls_at_once_on_a_connection_not_yet_open(self, transport: Transport) -> None:
        outputs: list[bytes] = []
        threads = [
            threading.Thread(target=lambda: outputs.append(said(transport, "/bin/echo", "x").stdout)) for _ in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert outputs == [b"x\n"] * 16

    @pytest.mark.parametrize(("stdin", "kind"), [(b"", 96), (b"unread", 94)], ids=["end", "data"])
    def test_nothing_is_sent_behind_a_channels_close(
        self, ssh: SshTransport, stdin: bytes, kind: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A command that is over before its input: sshd ends the connection over what reaches a forgotten channel.

        Paramiko builds such a message first and sends it later; here, half a second later.
        """
        real = paramiko.Transport._send_user_message

        def late(transport: paramiko.Transport, message: paramiko.Message) -> None:
            if message.asbytes()[0] == kind:
                time.sleep(0.5)
            real(transport, message)

        said(ssh, "/bin/true")
        before = ssh.link._transport
        monkeypatch.setattr(paramiko.Transport, "_send_user_message", late)
        for _ in range(3):
            said(ssh, "/bin/true", stdin=stdin)
        time.sleep(1.0)  # what was sent late has arrived
        assert ssh.link.alive
        assert ssh.link._transport is before

    def test_a_host_without_room_for_a_session_is_asked_again(self, ssh: SshTransport) -> None:
        """The sandbox's sshd allows ten at once. Failed as "the host refuses another session"."""
        said(ssh, "/bin/true")
        transport = ssh.link._transport
        assert transport is not None
        others = [transport.open_session() for _ in range(10)]
        threading.Timer(0.5, lambda: [other.close() for other in others]).start()
        assert said(ssh, "/bin/echo", "x").stdout == b"x\n"

    def test_a_host_that_stays_without_room_is_told(self, ssh: SshTransport) -> None:
        said(ssh, "/bin/true")
        transport = ssh.link._transport
        assert transport is not None
        others = [transport.open_session() for _ in range(10)]
        with pytest.raises(HostUnreachable, match="refuses another session"):
            said(ssh, "/bin/echo", "x")
        for other in others:
            other.close()


class TestConfiguration:
    def test_proxy_jump_and_none(self, box: Box, tmp_path: Path) -> None:
        jumped = (
            f"Host jumped\n  HostName 127.0.0.1\n  Port {box.sshd.port}\n  ProxyJump root@127.0.0.1:{box.sshd.port}\n"
        )
        # The same address by another name, so that the jump is not the host itself.
        jumped = jumped.replace("HostName 127.0.0.1", "HostName localhost")
        direct = f"Host direct\n  HostName 127.0.0.1\n  Port {box.sshd.port}\n  ProxyJump none\n"
        (tmp_path / "ssh_config").write_text(jumped + direct)
        line = box.sshd.known_hosts_line()
        (tmp_path / "known_hosts").write_text(line + line.replace("127.0.0.1", "localhost"))
        for host in ("jumped", "direct"):
            before = box.sshd.log.count("Accepted publickey")
            transport = SshTransport(ssh_settings(box, tmp_path / "known_hosts", host=host, port=None))
            assert said(transport, "/bin/echo", host).stdout.decode().strip() == host
            assert box.sshd.log.count("Accepted publickey") - before == (2 if host == "jumped" else 1)
            transport.close()

    def test_an_unknown_key_of_the_jump_host_is_refused_too(self, box: Box, tmp_path: Path) -> None:
        jump = (
            f"Host jumped\n  HostName localhost\n  Port {box.sshd.port}\n  ProxyJump root@127.0.0.1:{box.sshd.port}\n"
        )
        (tmp_path / "ssh_config").write_text(jump)
        (tmp_path / "known_hosts").write_text(box.sshd.known_hosts_line().replace("127.0.0.1", "localhost"))
        transport = SshTransport(ssh_settings(box, tmp_path / "known_hosts", host="jumped", port=None))
        with pytest.raises(HostKeyRefused):
            said(transport, "/bin/true")


def jumped(box: Box) -> str:
    """The same server by another name, through itself."""
    port = box.sshd.port
    return f"Host jumped\n  HostName localhost\n  Port {port}\n  ProxyJump root@127.0.0.1:{port}\n"


@contextlib.contextmanager
def frozen(box: Box) -> Iterator[None]:
    """Every server process of an open connection stopped."""
    for pid in box.sshd.sessions():
        send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        thaw(box)


def thaw(box: Box) -> None:
    for pid in box.sshd.sessions():
        send(pid, signal.SIGCONT)


def running(*words: str) -> list[int]:
    """Processes with just this command line. The container's are among this machine's own."""
    return [pid for pid, argv in command_lines().items() if tuple(argv) == words]
