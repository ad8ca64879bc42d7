"""This machine as a target: bytes are exact, deadlines hold, nothing of the operator's shell goes over."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ops.agent import compiled, wire
from dflash_ops.agent.messages import Nothing, Overview, Releases, RunsRequest, StatusRequest
from dflash_ops.errors import AgentFailed, DeadlineExceeded, UsageError
from dflash_ops.remote import Place, Remote
from dflash_ops.transport.base import chunks, render
from dflash_ops.transport.local import LocalTransport
from tests.ops.conftest import Lab
from tests.waiting import PATIENCE_S, wait_until

HERE = LocalTransport()
words = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20), min_size=1, max_size=5)


def python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-c", code, *arguments)


class TestRender:
    @given(words)
    @settings(max_examples=60)
    def test_a_shell_gives_back_exactly_these_words(self, argv: list[str]) -> None:
        line = render(["printf", "%s\\0", *argv])
        said = subprocess.run(["sh", "-c", line], capture_output=True, check=True).stdout
        assert said.split(b"\0")[:-1] == [word.encode() for word in argv]

    def test_what_no_shell_can_carry_is_refused(self) -> None:
        for argv in ([], ["a\0b"]):
            with pytest.raises(ValueError):
                render(argv)

    @given(st.binary(max_size=1000), st.integers(1, 50))
    def test_chunks_keep_every_byte(self, data: bytes, size: int) -> None:
        cut = list(chunks(data, size))
        assert b"".join(cut) == data
        assert all(0 < len(piece) <= size for piece in cut)


class TestCall:
    def test_ten_megabytes_go_and_come_unaltered(self) -> None:
        data = os.urandom(10 << 20)
        done = HERE.call(
            python("import sys, shutil; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)"),
            stdin=data,
            deadline=PATIENCE_S,
        )
        assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(data).digest()

    def test_a_command_that_does_not_read_its_stdin_is_no_error(self) -> None:
        done = HERE.call(python("print('done')"), stdin=bytes(1 << 20), deadline=PATIENCE_S)
        assert (done.returncode, done.stdout) == (0, b"done\n")

    def test_floods_on_both_outputs_do_not_block(self) -> None:
        code = "import sys\nfor _ in range(2000): sys.stderr.write('e' * 1000); sys.stdout.write('o' * 1000)"
        done = HERE.call(python(code), deadline=PATIENCE_S)
        assert len(done.stdout) == 2_000_000
        assert 0 < len(done.stderr) <= 1 << 16

    def test_the_deadline_ends_the_command_and_its_children(self) -> None:
        code = (
            "import subprocess, sys; subprocess.Popen(['sleep', sys.argv[1]]); subprocess.run(['sleep', sys.argv[1]])"
        )
        mark = f"61{os.getpid()}"
        with pytest.raises(DeadlineExceeded):
            HERE.call(python(code, mark), deadline=1.0)

        def gone() -> bool:
            return not [
                path
                for path in Path("/proc").glob("[0-9]*/cmdline")
                if mark.encode() in (path.read_bytes() if path.exists() else b"")
            ]

        assert wait_until(gone, "the children's end")

    def test_the_environment_is_clean(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_API_KEY", "secret")
        monkeypatch.setenv("PYTHONPATH", "/elsewhere")
        done = HERE.call(("/usr/bin/env",), deadline=PATIENCE_S)
        names = {line.split("=")[0] for line in done.stdout.decode().splitlines()}
        assert names == {"HOME", "USER", "LANG", "PATH", "TERM"}

    def test_a_missing_program_is_an_agent_failure(self) -> None:
        with pytest.raises(AgentFailed, match="cannot run /nonexistent/python"):
            HERE.call(("/nonexistent/python",), deadline=5)
        with pytest.raises(AgentFailed), HERE.stream(("/nonexistent/python",)):
            pass


class TestStream:
    def test_bytes_come_as_they_are_written_and_leaving_ends_the_command(self) -> None:
        code = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
        with HERE.stream(python(code)) as stream:
            pid = int(stream.read(PATIENCE_S) or b"0")
            assert stream.read(0.05) is None
            assert Path(f"/proc/{pid}").exists()
        assert not Path(f"/proc/{pid}").exists()

    def test_the_end_tells_how(self) -> None:
        with HERE.stream(python("import sys; sys.stderr.write('bad luck'); sys.exit(3)")) as stream:
            while stream.read(PATIENCE_S) != b"":
                pass
            end = stream.end()
        assert (end.returncode, end.stderr) == (3, b"bad luck")


def agent_and_twin(lab: Lab) -> tuple[Path, Path]:
    """The shipped agent and its compiled twin."""
    agent, twin = sorted((lab.root / "agents").iterdir(), key=lambda path: len(path.name))
    assert twin == compiled.path_of(agent)
    return agent, twin


def program(lab: Lab) -> str:
    """The archive that one call really runs: what its own traceback names."""
    argv = lab.remote.argv("status", "00" * 16, 0)
    request = wire.Request("00" * 16, PATIENCE_S, str(lab.root), str(lab.root), {"run_id": []})
    said = HERE.call(argv, stdin=request.encode(), deadline=PATIENCE_S).stderr.decode()
    (path,) = set(re.findall(r'File "(.*\.pyz)/dflash_ops/agent/__main__\.py"', said))
    return str(path)


class TestRemote:
    def test_the_agent_is_shipped_once(self, lab: Lab) -> None:
        for _ in range(2):
            assert lab.remote.call("releases", Nothing(), Releases, deadline=PATIENCE_S).releases == ()
        (agent, _) = agent_and_twin(lab)
        assert hashlib.sha256(agent.read_bytes()).hexdigest() == agent.name.removesuffix(".pyz")

    def test_a_damaged_agent_is_shipped_again(self, lab: Lab) -> None:
        lab.remote.call("releases", Nothing(), Releases, deadline=PATIENCE_S)
        (agent, _) = agent_and_twin(lab)
        agent.write_bytes(agent.read_bytes()[:1000])
        lab.remote.call("releases", Nothing(), Releases, deadline=PATIENCE_S)
        assert hashlib.sha256(agent.read_bytes()).hexdigest() == agent.name.removesuffix(".pyz")

    def test_later_calls_run_the_compiled_twin(self, lab: Lab) -> None:
        """Shown able to fail: with the twin not looked for, `argv` of the second call names the shipped archive."""
        lab.remote.call("releases", Nothing(), Releases, deadline=PATIENCE_S)
        agent, twin = agent_and_twin(lab)
        with zipfile.ZipFile(agent) as shipped, zipfile.ZipFile(twin) as both:
            sources = shipped.namelist()
            assert set(both.namelist()) == {*sources, *(f"{name}c" for name in sources)}
            for name in sources:
                assert both.read(name) == shipped.read(name)
        assert program(lab) == str(twin)

    @pytest.mark.parametrize("place", [0, 10, 66, 67, 5000, -1])
    def test_a_damaged_twin_is_left_alone_and_made_again(self, lab: Lab, place: int) -> None:
        """Shown able to fail: with the loader content with any twin, the call runs damaged bytecode."""
        lab.remote.call("releases", Nothing(), Releases, deadline=PATIENCE_S)
        agent, twin = agent_and_twin(lab)
        damaged = bytearray(twin.read_bytes())
        damaged[place] ^= 1
        twin.write_bytes(damaged)
        assert program(lab) == str(agent)
        assert program(lab) == str(twin)

    def test_a_directory_that_may_only_be_read_does_without_the_twin(self, lab: Lab) -> None:
        lab.remote.call("releases", Nothing(), Releases, deadline=PATIENCE_S)
        _, twin = agent_and_twin(lab)
        twin.unlink()
        twin.mkdir()  # as good as a disk that refuses
        for _ in range(2):
            assert lab.remote.call("releases", Nothing(), Releases, deadline=PATIENCE_S).releases == ()

    def test_noise_before_the_answer_is_tolerated(self, lab: Lab, tmp_path: Path) -> None:
        noisy = tmp_path / "python"
        noisy.write_text(f"#!/bin/sh\necho motd; printf 'no newline'; exec {sys.executable} \"$@\"\n")
        noisy.chmod(0o755)
        remote = Remote(HERE, Place(str(noisy), str(lab.root), str(lab.root)))
        assert remote.call("status", StatusRequest(), Overview, deadline=PATIENCE_S).run is None

    @pytest.mark.parametrize(
        ("script", "says"),
        [
            ("echo 'bash: python: not found' >&2; exit 127", "exit code 127"),
            ("kill -9 $$", "killed by signal 9"),
            ("exit 0", "exit code 0"),
            ("echo only noise", "only noise"),
        ],
    )
    def test_no_answer_names_what_happened(self, lab: Lab, tmp_path: Path, script: str, says: str) -> None:
        broken = tmp_path / "python"
        broken.write_text(f"#!/bin/sh\n{script}\n")
        broken.chmod(0o755)
        remote = Remote(HERE, Place(str(broken), str(lab.root), str(lab.root)))
        with pytest.raises(AgentFailed) as caught:
            remote.call("status", StatusRequest(), Overview, deadline=PATIENCE_S)
        assert says in "\n".join(caught.value.lines())

    def test_the_agents_own_deadline_answers_in_a_frame(self, lab: Lab) -> None:
        (lab.root / "agents").mkdir(parents=True)
        from dflash_ops.agent.files import try_lock
        from dflash_ops.agent.messages import SelectRequest
        from dflash_ops.agent.releases import Deployed

        held = try_lock(lab.layout.deploy_lock)  # a deploy that never ends
        assert held is not None
        try:
            with pytest.raises(DeadlineExceeded) as caught:
                lab.remote.call("select", SelectRequest("0" * 16, "t"), Deployed, deadline=1.0)
            assert caught.value.reported
        finally:
            os.close(held)

    def test_errors_of_the_agent_keep_their_class(self, lab: Lab) -> None:
        with pytest.raises(UsageError, match="no run 'x'"):
            lab.remote.call("status", StatusRequest(run_id="x"), Overview, deadline=PATIENCE_S)

    def test_an_unknown_verb_and_malformed_parameters_are_told(self, lab: Lab) -> None:
        with pytest.raises(AgentFailed, match="no verb"):
            lab.remote.call("reboot", Nothing(), Nothing, deadline=PATIENCE_S)
        with pytest.raises(AgentFailed, match="the agent failed"):
            lab.remote.call("launch", RunsRequest(), Nothing, deadline=PATIENCE_S)

    def test_a_malformed_request_ends_without_a_frame(self, lab: Lab) -> None:
        lab.remote.call("releases", Nothing(), Releases, deadline=PATIENCE_S)
        done = HERE.call(lab.remote.argv("status", "00" * 16, 0), stdin=b"{}\n", deadline=PATIENCE_S)
        assert done.returncode == 14
        assert b"malformed request" in done.stderr
        assert not list(wire.FrameReader("00" * 16).feed(done.stdout))
