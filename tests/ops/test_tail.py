"""Following a log: every byte once, whatever cuts in; safe text; Ctrl-C and pipes leave no mess."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops import tail as tailing
from dflash_ops.agent import follow as following
from dflash_ops.agent import process, runs, wire
from dflash_ops.agent.follow import FollowRequest, line_start
from dflash_ops.errors import DeadlineExceeded, HostUnreachable, UsageError
from dflash_ops.remote import Place, Remote
from dflash_ops.tail import Cleaner, Sink
from dflash_ops.transport.local import LocalStream, LocalTransport
from tests.ops.conftest import Lab
from tests.waiting import PATIENCE_S, wait_until

LONG = "standin.steps=1000000"
logs = st.lists(
    st.sampled_from(
        ["a", "é", "漢", "\n", "\r", "\r\n", "\x1b[31m", "\x1b]0;title\x07", "\x1b(B", "\x9b", "\0", "\t", "\x1b"]
    ),
    max_size=30,
)


class TestCleaner:
    @given(logs, st.lists(st.integers(0, 200), max_size=8))
    def test_cutting_changes_nothing_and_no_control_survives(self, parts: list[str], cuts: list[int]) -> None:
        """Shown able to fail: without holding back an unfinished sequence the two results differ."""
        data = "".join(parts).encode()
        places = sorted({cut % (len(data) + 1) for cut in cuts})
        pieces = [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]
        whole, cut = Cleaner(), Cleaner()
        expected = whole.feed(data) + whole.end()
        assert "".join(cut.feed(piece) for piece in pieces) + cut.end() == expected
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", expected)

    def test_text_is_kept(self) -> None:
        cleaner = Cleaner()
        assert cleaner.feed("step 1 — ok\tλ\n".encode()) + cleaner.end() == "step 1 — ok\tλ\n"

    def test_an_endless_sequence_is_not_held_back_for_ever(self) -> None:
        cleaner = Cleaner()
        said = "".join(cleaner.feed(b"\x1b]0;" + b"x" * 1000) for _ in range(20)) + cleaner.end()
        assert "x" in said


class TestLineStart:
    @given(
        st.lists(st.binary(max_size=5).filter(lambda line: b"\n" not in line), max_size=12),
        st.booleans(),
        st.integers(0, 15),
    )
    def test_the_last_lines_are_the_last_lines(self, lines: list[bytes], finished: bool, count: int) -> None:
        import tempfile

        data = b"\n".join(lines) + (b"\n" if finished and lines else b"")
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            got = data[line_start(Path(file.name), count, len(data)) :]
        everything = data.splitlines(keepends=True) if b"\r" not in data else re.findall(rb"[^\n]*\n|[^\n]+", data)
        everything = re.findall(rb"[^\n]*\n|[^\n]+", data)
        assert got == b"".join(
            everything[len(everything) - count :] if count < len(everything) else everything if count else []
        )


class Flaky(LocalTransport):
    """A route that drops every connection after a few reads, and sometimes cannot connect. `then` is called once, when
    the tenth is asked for."""

    def __init__(self, every: int, then: Callable[[], object]) -> None:
        self.every = every
        self.then = then
        self.opened = 0

    @contextmanager
    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Any]:
        self.opened += 1
        if self.opened == 10:
            self.then()
        if self.opened % 3 == 2:
            raise HostUnreachable("no route")
        with super().stream(argv, stdin=stdin) as stream:
            yield Dropping(stream, self.every)


class Dropping:
    def __init__(self, stream: LocalStream, reads: int) -> None:
        self._stream = stream
        self._reads = reads

    def read(self, timeout: float) -> bytes | None:
        self._reads -= 1
        if self._reads < 0:
            raise HostUnreachable("the connection dropped")
        return self._stream.read(timeout)

    def end(self) -> Any:
        return self._stream.end()


def end(run: runs.RunStatus) -> None:
    """Tell the run's supervisor to end it in order; does not wait."""
    record = runs.read_run(Path(run.directory))
    assert record is not None
    assert record.supervisor is not None
    assert process.send(record.supervisor, signal.SIGTERM)


def collected(lab: Lab, transport: LocalTransport, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, str]:
    monkeypatch.setattr(tailing, "BACKOFF_S", (0.01, 0.05))
    remote = Remote(transport, Place(os.sys.executable, str(lab.root), str(lab.root)))  # type: ignore[attr-defined]
    got: list[bytes] = []
    last = tailing.tail(remote, lab.newest().run_id, lines=-1, follow=True, sink=Sink(got.append, lambda _: None))
    return b"".join(got), last.status.state


def followers(lab: Lab) -> list[int]:
    """The agents that follow a log of this lab."""
    lines = process.command_lines().items()
    return [pid for pid, argv in lines if argv[-1:] == ["follow"] and any(str(lab.root) in word for word in argv)]


class TestFollowing:
    def test_drops_lose_nothing_and_repeat_nothing(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        lab.deploy()
        run = lab.launch(LONG, "standin.interval=0.02")
        data, state = collected(lab, Flaky(4, lambda: end(run)), monkeypatch)
        assert data == Path(lab.newest().log).read_bytes()
        assert state == "finished"

    def test_thirty_megabytes_arrive_whole(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        lab.deploy()
        lab.start()
        lab.wait_for("finished")
        with Path(lab.newest().log).open("ab") as log:
            for _ in range(30):
                log.write(os.urandom(1 << 20))
        data, _ = collected(lab, LocalTransport(), monkeypatch)
        assert data == Path(lab.newest().log).read_bytes()

    def test_a_log_that_was_cut_starts_again(self, lab: Lab) -> None:
        lab.deploy()
        # A step so rare that the follower looks before the log is again as long as it was.
        lab.launch(LONG, "standin.interval=0.5")
        remarks: list[str] = []
        got: list[bytes] = []

        def write(piece: bytes) -> None:
            got.append(piece)
            if len(got) == 2:
                os.truncate(lab.newest().log, 0)
            if len(got) > 4:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            tailing.tail(lab.remote, lab.newest().run_id, lines=-1, follow=True, sink=Sink(write, remarks.append))
        assert any("starting again" in text for text in remarks)

    def test_a_frozen_follower_is_given_up_and_replaced(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        """The agent is stopped with SIGSTOP in the middle: no byte, no beat; the next connection goes on."""
        monkeypatch.setattr(tailing, "SILENCE_S", PATIENCE_S)
        monkeypatch.setattr(tailing, "BEAT_S", 0.2)
        lab.deploy()
        run = lab.launch(LONG, "standin.interval=0.1")
        remarks: list[str] = []
        got: list[bytes] = []

        def write(piece: bytes) -> None:
            got.append(piece)
            if len(got) == 2:
                os.kill(followers(lab)[0], signal.SIGSTOP)
                monkeypatch.setattr(tailing, "SILENCE_S", 1.0)  # from the freeze until it is noticed
            elif len(remarks) == 1:
                end(run)
                remarks.append("told to end")

        def remark(text: str) -> None:
            if not remarks:
                monkeypatch.setattr(tailing, "SILENCE_S", PATIENCE_S)
            remarks.append(text)

        last = tailing.tail(lab.remote, run.run_id, lines=-1, follow=True, sink=Sink(write, remark))
        assert b"".join(got) == Path(run.log).read_bytes()
        assert last.status.state == "finished"
        assert "connection lost" in remarks[0]

    def test_patience_ends(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tailing, "PATIENCE_S", 0.2)
        lab.deploy()
        lab.start()

        class Dead(LocalTransport):
            @contextmanager
            def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Any]:
                raise DeadlineExceeded("frozen")
                yield

        with pytest.raises(DeadlineExceeded):
            collected(lab, Dead(), monkeypatch)

    def test_what_cannot_mend_is_not_repeated(self, lab: Lab) -> None:
        with pytest.raises(UsageError):
            tailing.tail(
                lab.remote, "20200101T000000Z-x-0000", lines=-1, follow=True, sink=Sink(lambda _: None, lambda _: None)
            )

    def test_an_abandoned_follower_ends_by_its_beat(self, lab: Lab) -> None:
        lab.deploy()
        lab.launch(LONG, "standin.interval=60")
        fab = lab.start_fab("tail-log")
        assert fab.stdout is not None
        fab.stdout.readline()
        assert followers(lab)
        fab.kill()
        wait_until(lambda: not followers(lab), "the follower's end")


class TestCommand:
    def test_no_follow_returns_at_once_and_lines_counts(self, lab: Lab) -> None:
        lab.deploy()
        run = lab.launch(LONG)
        wait_until(lambda: len(Path(run.log).read_text().splitlines()) > 15, "some log")
        done = lab.fab("tail-log", "--no-follow", "--lines", "3")
        assert done.returncode == 0
        assert len(done.stdout.splitlines()) == 3
        assert lab.fab("tail-log", "--no-follow", "--lines", "0").stdout == ""
        assert lab.fab("tail-log", "--no-follow", "--lines", "all", "--run", run.run_id).stdout.startswith(
            "[dflash] run"
        )

    def test_a_log_that_grows_meanwhile_gives_no_more_lines_than_asked(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Shown able to fail: read to its end instead of the end that was counted from, it gave eight."""
        lab.deploy()
        lab.start()
        run = lab.wait_for("finished")
        plain = following.line_start

        def growing(path: Path, lines: int, end: int) -> int:
            at = plain(path, lines, end)
            with path.open("ab") as log:
                log.write(b"more\n" * 5)
            return at

        monkeypatch.setattr(following, "line_start", growing)
        got = bytearray()

        def emit(event: wire.Event) -> bool:
            got.extend(event.payload if isinstance(event, wire.Data) else b"")
            return True

        following.follow(lab.layout, FollowRequest(run.run_id, lines=3, follow=False), emit)
        assert got.count(b"\n") == 3

    def test_raw_is_exact_and_the_default_is_safe(self, lab: Lab) -> None:
        lab.deploy()
        lab.start()
        lab.wait_for("finished")
        with Path(lab.newest().log).open("ab") as log:
            log.write(b"\x1b]0;owned\x07\x1b[31mred\xff\n")
        safe = lab.fab("tail-log", "--lines", "1").stdout
        assert safe == "red\ufffd\n"
        raw = subprocess.run(
            lab.command("tail-log", "--raw", "--lines", "all"),
            cwd=lab.checkout,
            env=lab.environment,
            capture_output=True,
            check=False,
        )
        assert raw.stdout == Path(lab.newest().log).read_bytes()

    def test_ctrl_c_leaves_the_run_alone_says_how_to_go_on_and_exits_130(self, lab: Lab) -> None:
        lab.deploy()
        run = lab.launch(LONG)
        fab = lab.start_fab("tail-log")
        assert fab.stdout is not None
        assert fab.stderr is not None
        wait_until(lambda: select.select([fab.stdout], [], [], 0)[0], "the first line")
        os.killpg(fab.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
        assert fab.wait(PATIENCE_S) == 130
        said = fab.stderr.read().decode()
        assert f"fab tail-log --run {run.run_id}" in said
        assert "fab stop" in said
        assert "Traceback" not in said
        assert lab.newest().state == "training"

    def test_a_closed_pipe_is_quiet(self, lab: Lab) -> None:
        lab.deploy()
        lab.launch(LONG)
        line = f"{' '.join(lab.command('tail-log'))} 2>err | head -n 3"
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=lab.checkout,
            env=lab.environment,
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert len(done.stdout.splitlines()) == 3
        said = (lab.checkout / "err").read_text()
        assert "Traceback" not in said
        assert "BrokenPipe" not in said
        assert lab.newest().state == "training"

    def test_the_run_that_failed_gives_its_code(self, lab: Lab) -> None:
        lab.deploy()
        lab.fab("launch", "--set", "standin.mode=crash")
        done = lab.fab("tail-log")
        assert done.returncode == 30
        assert "bad luck" in done.stdout
        assert "failed: exit code 3" in done.stderr

    @pytest.mark.parametrize(
        "words", [("--lines", "abc"), ("--lines=-5",), ("--lines", ""), ("--lines", "1e3"), ("--run", "x;y")]
    )
    def test_bad_words_exit_2(self, lab: Lab, words: tuple[str, ...]) -> None:
        done = lab.fab("tail-log", *words)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr

    def test_no_run_yet(self, lab: Lab) -> None:
        done = lab.fab("tail-log")
        assert done.returncode == 2
        assert "no run" in done.stderr


def test_the_newest_run_is_the_one_followed(lab: Lab) -> None:
    lab.deploy()
    for _ in range(2):
        lab.start()
        lab.wait_for("finished")
    newest = max((path for path in runs.directories(lab.layout)), key=lambda path: path.stat().st_mtime_ns)
    assert lab.fab("tail-log", "--lines", "all").stdout.splitlines()[0] == f"[dflash] run {newest.name}"
