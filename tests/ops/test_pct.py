"""Which layer failed, by the words that each leaves; the hop's exact words; and pct versions without --keep-env.

The real thing is in tests/sandbox; this is the table of messages, and runs anywhere. Shown able to fail: with the words
ignored and the exit code taken instead, with `--` left out, and with an iterator sent twice, these went red.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from dflash_ops.errors import (
    AgentFailed,
    ContainerMissing,
    ContainerStopped,
    DeadlineExceeded,
    HostUnreachable,
    OpsError,
)
from dflash_ops.settings import Ssh
from dflash_ops.transport.base import Completed
from dflash_ops.transport.pct import PctTransport
from dflash_ops.transport.ssh import SshTransport

RUNNING = Completed(0, b"status: running\n", b"")


@dataclass
class Link:
    label: str = "root@pve"
    alive: bool = True


@dataclass
class ScriptedSsh(SshTransport):
    """SSH that answers `pct status` and everything else from a script, and remembers what it was asked to run."""

    status: Completed | OpsError = RUNNING
    answers: list[Completed] = field(default_factory=list)
    asked: list[tuple[str, ...]] = field(default_factory=list)
    stdins: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(Ssh(host="pve"))
        self.link = Link()  # type: ignore[assignment]  # its two facts are all that is asked for here

    def execute(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes],
        deadline: float,
        silence: float | None = None,
        on_stdout: Callable[[bytes], None] | None,
    ) -> Completed:
        self.asked.append(tuple(argv))
        self.stdins.append(stdin if isinstance(stdin, bytes) else b"".join(stdin))
        if "status" in argv:
            if isinstance(self.status, OpsError):
                raise self.status
            return self.status
        return self.answers.pop(0) if self.answers else Completed(0, b"", b"")


def explain(code: int | None, stderr: str, status: Completed | OpsError = RUNNING, *, alive: bool = True) -> OpsError:
    ssh = ScriptedSsh(status=status)
    ssh.link.alive = alive  # type: ignore[misc]  # a plain field of the stand-in
    return PctTransport(ssh, 200).explain(Completed(code, b"", stderr.encode()))


class TestLayers:
    @pytest.mark.parametrize(
        ("code", "stderr", "kind", "words"),
        [
            (2, "Configuration file 'nodes/pve/lxc/200.conf' does not exist\n", ContainerMissing, "200 does not exist"),
            (255, "container '200' not running!\n", ContainerStopped, "not running"),
            (127, "bash: line 1: /usr/sbin/pct: No such file or directory\n", ContainerMissing, "has no /usr/sbin/pct"),
            (127, "sh: 1: /usr/sbin/pct: not found\n", ContainerMissing, "has no /usr/sbin/pct"),
            (126, "bash: line 1: /usr/sbin/pct: Permission denied\n", ContainerMissing, "has no /usr/sbin/pct"),
            (255, "please run as root\n", ContainerMissing, "refuses to run"),
            (255, "Unknown option: x\n400 unable to parse option\npct exec ...\n", AgentFailed, "does not understand"),
            (127, "/usr/bin/env: ‘/x/python’: No such file or directory\n", AgentFailed, "cannot run /x/python"),
            (127, "/usr/bin/env: '/x/python': No such file or directory\n", AgentFailed, "cannot run /x/python"),
            (126, "/usr/bin/timeout: failed to run command ‘/x’: Permission denied\n", AgentFailed, "cannot run /x"),
            (1, "Traceback ...\nImportError: no module\n", AgentFailed, "exit code 1"),
            (255, "", AgentFailed, "exit code 255"),
            (124, "", DeadlineExceeded, "time limit"),
            (None, "", AgentFailed, "killed"),
        ],
    )
    def test_by_words(self, code: int | None, stderr: str, kind: type[OpsError], words: str) -> None:
        error = explain(code, stderr)
        assert type(error) is kind
        assert words in error.what

    @pytest.mark.parametrize(
        ("status", "kind"),
        [
            (Completed(0, b"status: stopped\n", b""), ContainerStopped),
            (Completed(0, b"status: unknown\n", b""), ContainerMissing),
            (Completed(2, b"", b"Configuration file 'nodes/n/lxc/200.conf' does not exist\n"), ContainerMissing),
            (Completed(127, b"", b"bash: Kommando nicht gefunden\n"), ContainerMissing),  # a host that speaks German
            (HostUnreachable("gone"), HostUnreachable),
        ],
    )
    @pytest.mark.parametrize(("code", "stderr"), [(1, "lxc-attach: Failed to get init pid\n"), (137, ""), (None, "")])
    def test_where_words_do_not_say_pct_status_does(
        self, code: int | None, stderr: str, status: Completed | OpsError, kind: type[OpsError]
    ) -> None:
        assert type(explain(code, stderr, status)) is kind

    def test_a_lost_link_needs_no_further_question(self) -> None:
        assert type(explain(None, "", HostUnreachable("must not be asked"), alive=False)) is HostUnreachable


class TestHop:
    def test_its_words(self) -> None:
        pct = PctTransport(ScriptedSsh(), 200, environment={"TERM": "dumb"})
        argv = pct.route_argv(("python", "-c", "x"), 10.0)
        assert argv[:6] == ("/usr/sbin/pct", "exec", "200", "--keep-env", "0", "--")
        assert argv[6:10] == ("/usr/bin/timeout", "-k", "5", "11")
        assert argv[10:12] == ("/usr/bin/env", "-i")
        assert "TERM=dumb" in argv
        assert argv[-3:] == ("python", "-c", "x")

    REFUSAL = Completed(255, b"", b"Unknown option: keep-env\n400 unable to parse option\n")

    def test_an_old_pct_is_asked_again_without_keep_env_once(self) -> None:
        ssh = ScriptedSsh(answers=[self.REFUSAL, Completed(0, b"one", b""), Completed(0, b"two", b"")])
        pct = PctTransport(ssh, 200)
        assert pct.call(["x"], stdin=b"in", deadline=10.0).stdout == b"one"
        assert pct.call(["x"], stdin=b"in", deadline=10.0).stdout == b"two"
        assert ["--keep-env" in argv for argv in ssh.asked] == [True, False, False]
        assert ssh.stdins == [b"in", b"in", b"in"]

    def test_stdin_that_cannot_be_repeated_is_not_risked(self) -> None:
        ssh = ScriptedSsh(answers=[self.REFUSAL, Completed(0, b"one", b"")])
        pct = PctTransport(ssh, 200)
        assert pct.call(["x"], stdin=iter([b"in"]), deadline=10.0).stdout == b"one"
        assert ssh.stdins == [b"", b"in"]
        assert ssh.asked[0][-1] == "/bin/true"
