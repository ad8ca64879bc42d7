"""Launch, states, stop: real `fab` processes, a real supervisor, real signals."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_ops.agent import files, launch, launchers, process, runs, stop
from dflash_ops.agent.gate import GateRequest
from dflash_ops.agent.launch import LaunchRequest
from dflash_ops.agent.process import Identity
from dflash_ops.agent.runs import ExitRecord, RunRecord
from dflash_ops.agent.stop import StopRequest
from tests.ops.conftest import Lab
from tests.terminal import Terminal
from tests.waiting import PATIENCE_S, wait_until

LONG = "standin.steps=1000000"
DEAF = "standin.mode=deaf"


def identities(lab: Lab) -> tuple[Identity, Identity]:
    """(supervisor, trainer) of the newest run."""
    record = runs.read_run(Path(lab.newest().directory))
    assert record is not None
    assert record.supervisor is not None
    assert record.trainer is not None
    return record.supervisor, record.trainer


def kill(identity: Identity) -> None:
    assert process.send(identity, signal.SIGKILL)
    assert process.wait_gone(identity, PATIENCE_S)


class TestMainJob:
    def test_deploy_launch_then_the_log_to_the_end(self, lab: Lab) -> None:
        done = lab.fab("deploy", "launch", "--variant", "threadwarm")
        assert done.returncode == 0, done.stderr
        assert "is started" in done.stdout
        tail = lab.fab("tail-log", "--lines", "all")
        assert tail.returncode == 0, tail.stderr
        run = lab.newest()
        head = tail.stdout.splitlines()
        assert head[0] == f"[dflash] run {run.run_id}"
        assert head[1] == f"[dflash] release {run.release}"
        assert head[2] == "[dflash] variant threadwarm"
        assert any(line.startswith("[dflash] versions python 3.") for line in head)
        assert "step 3 loss 0.333" in head
        assert "finished" in tail.stderr
        assert Path(lab.root / "train_threadwarm.log").read_text() == Path(run.log).read_text()
        body = lab.status()
        assert (body["run"]["state"], body["run"]["exit_code"], body["holder"]) == ("finished", 0, None)
        assert body["run"]["latest"]["step"] == 3

    def test_the_trainer_sees_a_clean_environment(self, lab: Lab) -> None:
        lab.fab("deploy", "launch")
        lab.wait_for("finished")
        line = next(line for line in Path(lab.newest().log).read_text().splitlines() if line.startswith("environment"))
        assert "STANDIN_TOKEN" in line
        assert "LAPTOP_SECRET" not in line
        for name in ("HOME", "PATH", "TERM", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            assert f"'{name}'" in line
        everything = b"".join(path.read_bytes() for path in lab.root.rglob("*") if path.is_file())
        assert b"secret-value" not in everything  # values from hosts.yaml are not written to the target's disk

    def test_the_run_directory_is_private_and_complete(self, lab: Lab) -> None:
        lab.fab("deploy", "launch")
        directory = Path(lab.wait_for("finished").directory)
        assert directory.stat().st_mode & 0o777 == 0o700
        assert {path.name for path in directory.iterdir()} == {
            "run.json", "train.log", "metrics.jsonl", "exit.json", "checkpoints",
        }  # fmt: skip

    def test_without_a_release_it_says_so(self, lab: Lab) -> None:
        done = lab.fab("launch")
        assert done.returncode == 2
        assert "nothing is deployed" in done.stderr

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (("--variant", "nonsense"), ("no variant 'nonsense'", "the variants are threadwarm, sdpa")),
            (("--variant", "../x"), ("is no variant's name",)),
            (("--variant", "A b"), ("is no variant's name",)),
            (("--set", "standin.speed=1"), ("unknown setting 'standin.speed'",)),
            (("--set", "nonsense"), ("key=value",)),
            (("--launcher", "screen"), ("--launcher",)),
            (("--resume", "20200101T000000Z-x-0000"), ("no run",)),
            (("--resume", "../../etc"), ("no run",)),
            (("--resume", "auto"), ("checkpoint",)),
        ],
    )
    def test_wrong_words_exit_2_and_start_nothing(
        self, lab: Lab, words: tuple[str, ...], says: tuple[str, ...]
    ) -> None:
        lab.deploy()
        done = lab.fab("launch", *words)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        for text in says:
            assert text in done.stderr
        assert ("the variants are" in done.stderr) == ("nonsense" in words and "--variant" in words)
        assert runs.directories(lab.layout) == []

    def test_text_that_is_not_there_is_told_before_anything_starts(self, lab: Lab) -> None:
        """Seen to fail: it was "started", and failed seconds later where nobody looked."""
        lab.deploy()
        for source in (str(lab.layout.root / "chats.jsonl"), "chats.jsonl", "org/name"):
            done = lab.fab("launch", "--set", f"data.source={source}")
            assert done.returncode == 2, done.stderr
            assert f"data.source {source!r} is not on the target" in done.stderr
            assert "--set data.source=PATH" in done.stderr
        assert runs.directories(lab.layout) == []
        (lab.layout.root / "chats.jsonl").touch()
        assert lab.fab("launch", "--set", f"data.source={lab.layout.root / 'chats.jsonl'}").returncode == 0

    def test_an_altered_release_is_not_launched(self, lab: Lab) -> None:
        lab.deploy()
        (lab.layout.current / "trainer" / "__init__.py").write_text("edited = True\n")
        done = lab.fab("launch")
        assert done.returncode == 23
        assert "trainer/__init__.py was changed on the target" in done.stderr
        assert lab.fab("deploy", "launch").returncode == 0

    def test_ctrl_c_says_that_the_launch_may_go_on(self, lab: Lab) -> None:
        """Shown able to fail: it said `interrupted` and nothing else, while over SSH the target goes on."""
        lab.deploy()
        busy = lab.root / "python"  # it gives signs of life and no answer
        busy.write_text(f"#!/bin/sh\ntouch '{lab.root}/asked'; while sleep 0.2; do echo; done\n")
        busy.chmod(0o755)
        lab.hosts_file.write_text(lab.hosts_file.read_text() + f"    python: {busy}\n")
        fab = lab.start_fab("launch")
        wait_until((lab.root / "asked").exists, "the agent")
        fab.send_signal(signal.SIGINT)
        _, said = fab.communicate(timeout=PATIENCE_S)
        assert fab.returncode == 130
        assert b"may go on with the launch: `fab status` tells" in said
        assert b"Traceback" not in said


class TestOneAtATime:
    def test_a_second_launch_exits_21_and_names_the_holder(self, lab: Lab) -> None:
        lab.deploy()
        run = lab.launch(LONG)
        done = lab.fab("launch")
        assert done.returncode == 21
        assert run.run_id in done.stderr
        assert f"pid {run.pid}" in done.stderr
        assert "since 20" in done.stderr
        assert len(runs.directories(lab.layout)) == 1
        assert lab.fab("clear-cache").returncode == 21
        assert lab.status()["holder"]["run_id"] == run.run_id

    def test_a_wrong_variant_is_told_also_while_a_run_goes(self, lab: Lab) -> None:
        """Fails (exit 21) when the lock is asked before the words."""
        lab.deploy()
        lab.launch(LONG)
        done = lab.fab("launch", "--variant", "nonsense")
        assert done.returncode == 2
        assert "threadwarm" in done.stderr
        assert lab.fab("launch", "--variant", "threadwarm").returncode == 21

    def test_twenty_at_once_give_exactly_one_run(self, lab: Lab) -> None:
        """Shown able to fail: with the lock taken after the gate two runs started."""
        lab.deploy()

        def one(_: int) -> subprocess.CompletedProcess[str]:
            return lab.fab("launch", "--set", LONG, timeout=2 * PATIENCE_S)

        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            results = list(pool.map(one, range(20)))
        codes = sorted(result.returncode for result in results)
        assert codes == [0] + [21] * 19, [result.stderr for result in results if result.returncode not in (0, 21)]
        assert len(runs.directories(lab.layout)) == 1
        run_id = lab.newest().run_id
        assert all(run_id in result.stderr for result in results if result.returncode == 21)

    def test_the_lock_lives_as_long_as_the_trainer(self, lab: Lab) -> None:
        """A supervisor killed with -9 leaves a trainer that ignores TERM: the lock must still be held."""
        lab.deploy()
        lab.launch(LONG, DEAF)
        supervisor, trainer = identities(lab)
        kill(supervisor)
        assert process.alive(trainer)
        assert lab.newest().state == "lost"
        done = lab.fab("launch")
        assert done.returncode == 21
        assert f"pid {trainer.pid}" in done.stderr
        assert lab.fab("stop", "--wait", "1").returncode == 124
        assert lab.fab("stop", "--wait", "1", "--kill").returncode == 0
        assert lab.fab("launch").returncode == 0

    def test_relaunch_right_after_the_end_never_meets_the_old_lock(self, lab: Lab) -> None:
        lab.deploy()
        for _ in range(3):
            assert lab.fab("launch").returncode == 0
            assert lab.fab("tail-log").returncode == 0
        assert len(runs.directories(lab.layout)) == 3


class TestDeaths:
    """Nothing that is dead is ever called running."""

    def check(self, lab: Lab, state: str, code: int, *says: str) -> None:
        lab.wait_for(state)
        done = lab.fab("status")
        assert done.returncode == code
        for text in (state, *says):
            assert text in done.stdout
        assert json.loads(lab.fab("status", "--json").stdout)["run"]["state"] == state
        assert lab.fab("tail-log").returncode == code

    def test_trainer_killed(self, lab: Lab) -> None:
        lab.deploy()
        lab.launch(LONG)
        kill(identities(lab)[1])
        self.check(lab, "killed", 30, "SIGKILL")

    def test_supervisor_killed(self, lab: Lab) -> None:
        """The trainer is told by the kernel, checkpoints, and leaves: nothing trains unwatched."""
        lab.deploy()
        run = lab.launch(LONG)
        supervisor, trainer = identities(lab)
        kill(supervisor)
        assert process.wait_gone(trainer, PATIENCE_S)
        self.check(lab, "lost", 31)
        assert list(Path(run.directory).glob("checkpoints/step-*"))

    def test_both_killed(self, lab: Lab) -> None:
        lab.deploy()
        lab.launch(LONG)
        supervisor, trainer = identities(lab)
        assert process.send(supervisor, signal.SIGSTOP)  # so that it cannot record the trainer's end
        kill(trainer)
        kill(supervisor)
        self.check(lab, "lost", 31)

    def test_trainer_fails(self, lab: Lab) -> None:
        lab.fab("deploy", "launch", "--set", "standin.mode=crash")
        self.check(lab, "failed", 30, "exit code 3")

    def test_children_of_the_trainer_do_not_stay(self, lab: Lab) -> None:
        lab.fab("deploy", "launch", "--set", "standin.mode=family")
        log = Path(lab.wait_for("finished").log).read_text()
        child = int(next(line.split()[1] for line in log.splitlines() if line.startswith("child")))
        wait_until(lambda: process.identify(child) is None, "the child's end")

    def test_a_restarted_container(self, lab: Lab) -> None:
        lab.deploy()
        run = lab.launch(LONG)
        record = runs.read_run(Path(run.directory))
        assert record is not None
        earlier = replace(record, boot="0/0", supervisor=Identity(1, 1, "0/0"))
        assert runs.derive(earlier, Path("/nonexistent")).state == "lost"
        assert "restarted" in runs.derive(earlier, Path("/nonexistent")).detail

    def test_a_reused_pid_is_another_process(self, lab: Lab) -> None:
        me = process.identify(os.getpid())
        assert me is not None
        assert process.alive(me)
        assert not process.alive(replace(me, started=me.started + 1))
        assert not process.send(replace(me, started=me.started + 1), signal.SIGKILL)

    def test_a_launch_cut_off_before_the_supervisor(self, tmp_path: Path) -> None:
        gone = Identity(2**22 - 3, 1, process.boot())
        record = RunRecord(
            run_id="r", nonce="n", variant="v", release="x", created_at=time.time(), argv=(), log="", launcher="nohup",
            session="", host="h", boot=process.boot(), launched_by=gone,
        )  # fmt: skip
        assert runs.derive(record, tmp_path).state == "starting"
        assert runs.derive(replace(record, created_at=time.time() - 120), tmp_path).state == "lost"

    def test_an_agent_killed_between_the_record_and_the_supervisor(self, lab: Lab) -> None:
        """What is left is a record that says starting: it must not hold the next launch up, and must not count for
        ever. Shown able to fail: with the grace without an end in health.py the old record stays `starting`."""
        lab.deploy()
        child = os.fork()
        if child == 0:  # the agent, as far as the launcher; there it is killed
            launchers.start = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]  # the cut
            launch.launch(
                lab.layout, LaunchRequest("cut", "test", launcher="nohup", gate=GateRequest()), lambda _: None
            )
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        cut = lab.newest()
        assert (cut.state, lab.fab("status").returncode) == ("starting", 0)
        assert lab.fab("launch").returncode == 0
        assert lab.wait_for("finished").run_id != cut.run_id
        record = runs.read_run(Path(cut.directory))
        assert record is not None
        runs.write_run(Path(cut.directory), replace(record, created_at=time.time() - 120))
        assert lab.fab("status", "--run", cut.run_id).returncode == 31
        assert lab.fab("stop", "--run", cut.run_id).returncode == 0

    def test_a_clock_that_was_set_back_hides_no_living_run(self, lab: Lab) -> None:
        """Shown able to fail: sorted by time alone, `status` and `tail-log` show the run that has ended."""
        lab.deploy()
        lab.start()
        first = lab.wait_for("finished")
        record = runs.read_run(Path(first.directory))
        assert record is not None
        runs.write_run(Path(first.directory), replace(record, created_at=time.time() + 86400))
        lab.start(LONG)
        assert lab.wait_for("training").run_id != first.run_id

    def test_an_exit_record_with_kernel_kills_says_so(self, tmp_path: Path) -> None:
        runs.write_exit(tmp_path, ExitRecord(None, "SIGKILL", 1.0, "b", oom_kills=1))
        me = process.identify(os.getpid())
        assert me is not None
        record = RunRecord(
            run_id="r", nonce="n", variant="v", release="x", created_at=1.0, argv=(), log="/l", launcher="nohup",
            session="", host="h", boot=process.boot(), launched_by=me,
        )  # fmt: skip
        assert "for memory" in runs.derive(record, tmp_path).detail

    def test_torn_records_do_not_break_the_list(self, lab: Lab) -> None:
        lab.fab("deploy", "launch")
        run = lab.wait_for("finished")
        torn = lab.layout.run("20990101T000000Z-threadwarm-0000")
        torn.mkdir()
        (torn / "run.json").write_text('{"run_id": ')
        (lab.layout.runs / "not-a-run").mkdir()
        with (Path(run.directory) / "metrics.jsonl").open("a") as file:
            file.write('\x00garbage\n[1]\n{"event": "step"')
        done = lab.fab("runs", "--json")
        assert done.returncode == 0
        assert [one["run_id"] for one in json.loads(done.stdout)["runs"]] == [run.run_id]
        assert lab.fab("status").returncode == 0


class TestStop:
    def test_stop_checkpoints_and_records_exit_0(self, lab: Lab) -> None:
        lab.deploy()
        run = lab.launch(LONG)
        done = lab.fab("stop")
        assert done.returncode == 0, done.stderr
        assert "checkpoint written" in done.stdout
        end = runs.read_exit(Path(run.directory))
        assert end is not None
        assert (end.code, end.signal, end.forwarded) == (0, None, ("SIGTERM",))
        again = lab.fab("stop")
        assert (again.returncode, "nothing to stop" in again.stdout) == (0, True)
        assert lab.fab("stop", "--run", run.run_id).returncode == 0
        assert lab.fab("status").returncode == 0

    def test_a_stop_during_the_start_is_no_failure(self, lab: Lab) -> None:
        """Shown able to fail: before health.py knew of it, the run counted as killed and status exited with 30."""
        lab.deploy()
        lab.start("standin.mode=slow-start")
        wait_until(lambda: "importing" in Path(lab.newest().log).read_text(), "the trainer's start")
        assert lab.fab("stop").returncode == 0
        done = lab.fab("status")
        assert (done.returncode, "finished: stopped on request (SIGTERM) while" in done.stdout) == (0, True)
        assert lab.fab("tail-log").returncode == 0

    def test_a_stop_during_the_handover_waits_for_somebody_to_tell(self, lab: Lab) -> None:
        """Shown able to fail: when `stop` looked for a receiver once, it sent nothing and waited in vain."""
        lab.deploy()
        run = lab.launch(LONG)
        record = runs.read_run(Path(run.directory))
        me = process.identify(os.getpid())
        assert record is not None
        assert me is not None
        runs.write_run(Path(run.directory), replace(record, supervisor=None, trainer=None, launched_by=me))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(stop.stop, lab.layout, StopRequest("test", wait_s=PATIENCE_S), lambda _: None)
            time.sleep(0.3)  # time for one look; the outcome must be the same either way
            runs.write_run(Path(run.directory), record)
            assert stopping.result(PATIENCE_S).stopped
        assert lab.newest().detail == "stopped on request"

    @pytest.mark.parametrize("mode", ["normal", "deaf"])
    def test_a_run_whose_directory_was_deleted_can_still_be_stopped(self, lab: Lab, mode: str) -> None:
        """Shown able to fail: `stop` said that nothing ran, while `launch` was refused and told to use `stop`."""
        lab.deploy()
        run = lab.launch(LONG, f"standin.mode={mode}")
        _, trainer = identities(lab)
        shutil.rmtree(run.directory)
        refused = lab.fab("launch")
        assert refused.returncode == 21
        if mode == "deaf":
            assert lab.fab("stop", "--wait", "1").returncode == 124
        done = lab.fab("stop", "--wait", "2", "--kill")
        assert (done.returncode, "directory" in done.stdout) == (0, True)
        assert not process.alive(trainer)
        assert "nothing to stop" in lab.fab("stop").stdout
        assert lab.fab("launch").returncode == 0

    def test_two_stops_at_once_send_one_signal(self, lab: Lab) -> None:
        """The trainer takes a second TERM as `at once, without a checkpoint`: it must not get one."""
        lab.deploy()
        run = lab.launch(LONG)
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            codes = list(pool.map(lambda _: lab.fab("stop").returncode, range(3)))
        assert codes == [0, 0, 0]
        end = runs.read_exit(Path(run.directory))
        assert end is not None
        assert end.forwarded == ("SIGTERM",)
        assert list(Path(run.directory).glob("checkpoints/step-*"))

    def test_hup_and_term_to_the_supervisor_are_one_request(self, lab: Lab) -> None:
        lab.deploy()
        lab.launch(LONG)
        supervisor, _ = identities(lab)
        process.send(supervisor, signal.SIGHUP)
        process.send(supervisor, signal.SIGTERM)
        run = lab.wait_for("finished")
        assert run.detail == "stopped on request"

    def test_a_deaf_run_is_told_and_only_kill_ends_it(self, lab: Lab) -> None:
        lab.deploy()
        lab.launch(LONG, DEAF)
        done = lab.fab("stop", "--wait", "1")
        assert done.returncode == 124
        assert "--kill" in done.stderr
        assert lab.newest().live
        assert lab.fab("stop", "--wait", "1", "--kill").returncode == 0
        assert lab.newest().state == "killed"

    def test_resume_goes_on_from_the_newest_checkpoint_with_the_same_settings(self, lab: Lab) -> None:
        lab.deploy()
        first = lab.launch(LONG)
        lab.fab("stop")
        for word in (first.run_id, "auto"):
            done = lab.fab("launch", "--resume", word, "--set", "standin.interval=0.03")
            assert done.returncode == 0, done.stderr
            record = runs.read_run(Path(lab.newest().directory))
            assert record is not None
            assert record.resumed_from is not None
            assert record.resumed_from.startswith(first.directory if word != "auto" else str(lab.layout.runs))
            assert record.overrides["standin.steps"] == "1000000"
            assert record.overrides["standin.interval"] == "0.03"
            lab.wait_for("training")
            lab.fab("stop")
        refused = lab.fab("launch", "--resume", first.run_id, "--variant", "sdpa")
        assert refused.returncode == 2
        assert "threadwarm run, not sdpa" in refused.stderr


class TestCache:
    def test_cleared_by_default_and_kept_on_request(self, lab: Lab) -> None:
        lab.fab("deploy", "launch")
        release = lab.wait_for("finished").release
        mark = lab.layout.cache / release / "inductor" / "mark"
        mark.write_text("warm")
        assert lab.fab("launch", "--keep-cache").returncode == 0
        assert mark.exists()
        lab.wait_for("finished")
        assert lab.fab("launch").returncode == 0
        assert not mark.exists()
        lab.wait_for("finished")
        assert "cleared" in lab.fab("clear-cache").stdout
        assert list(lab.layout.cache.iterdir()) == []


@pytest.mark.skipif(launchers.tmux_program() is None, reason="tmux is not installed")
class TestTmux:
    @pytest.fixture(autouse=True)
    def _tmux(self, lab: Lab) -> None:
        lab.write_hosts("tmux")
        lab.deploy()

    def tmux(self, lab: Lab, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["tmux", "-S", str(lab.layout.tmux_socket), *words], capture_output=True, text=True, check=False
        )

    def test_the_session_shows_the_log_and_closes_with_the_run(self, lab: Lab) -> None:
        run = lab.launch(LONG)
        assert run.session == "dflash"
        wait_until(
            lambda: "step" in self.tmux(lab, "capture-pane", "-p", "-t", "=dflash:").stdout, "the log in the pane"
        )
        assert lab.fab("stop").returncode == 0
        wait_until(lambda: self.tmux(lab, "has-session", "-t", "=dflash").returncode != 0, "the session's end")
        assert lab.fab("launch").returncode == 0

    def test_ctrl_c_in_the_pane_does_not_stop_the_run(self, lab: Lab) -> None:
        lab.launch(LONG)
        self.tmux(lab, "send-keys", "-t", "=dflash:", "C-c")
        before = Path(lab.newest().log).stat().st_size
        wait_until(lambda: Path(lab.newest().log).stat().st_size > before, "more log")
        assert lab.newest().state == "training"

    def test_kill_session_is_a_stop_with_a_checkpoint(self, lab: Lab) -> None:
        lab.launch(LONG)
        self.tmux(lab, "kill-session", "-t", "=dflash")
        run = lab.wait_for("finished", "failed", "killed", "lost")
        assert (run.state, run.latest.checkpoint is not None) == ("finished", True)

    def test_a_server_killed_with_9_is_a_stop_too(self, lab: Lab) -> None:
        lab.launch(LONG)
        server = int(self.tmux(lab, "display-message", "-p", "#{pid}").stdout)
        os.kill(server, signal.SIGKILL)
        assert lab.wait_for("finished", "failed", "killed", "lost").state == "finished"

    def test_a_session_made_by_hand_is_named_not_taken(self, lab: Lab) -> None:
        self.tmux(lab, "-f", "/dev/null", "new-session", "-d", "-s", "dflash", "sleep", "600")
        done = lab.fab("launch")
        assert done.returncode == 21
        assert "tmux session 'dflash' exists" in done.stderr
        assert lab.newest().state == "failed"

    def test_attach_needs_a_terminal_and_a_run(self, lab: Lab) -> None:
        done = lab.fab("attach")
        assert done.returncode == 2
        assert "terminal" in done.stderr

    def test_attach_shows_the_run_and_detaching_leaves_it(self, lab: Lab) -> None:
        lab.launch(LONG)
        terminal = Terminal(lab.command("attach"), lab.checkout, lab.environment)
        try:
            wait_until(lambda: "step" in terminal.shown, "the log on the terminal")
            terminal.type(b"\x02d")
            assert terminal.process.wait(PATIENCE_S) == 0
        finally:
            terminal.close()
        assert lab.newest().state == "training"

    def test_a_root_too_long_for_a_socket_is_refused(self, lab: Lab) -> None:
        lab.root = lab.root / ("x" * 90)
        lab.write_hosts("tmux")
        lab.deploy()
        done = lab.fab("launch")
        assert done.returncode == 24
        assert "too long for a socket" in done.stderr


def test_systemd_is_refused_where_it_is_not(lab: Lab) -> None:
    if launchers.SYSTEMD_RUNNING.is_dir():
        pytest.skip("systemd runs here")
    lab.deploy()
    done = lab.fab("launch", "--launcher", "systemd")
    assert done.returncode == 24
    assert "does not run systemd" in done.stderr
    assert runs.directories(lab.layout) == []


def test_whole_writes_keep_the_old_file_when_they_fail(tmp_path: Path) -> None:
    path = tmp_path / "x"
    files.write_whole(path, b"old")
    with pytest.raises(TypeError):
        files.write_whole(path, "text")  # type: ignore[arg-type]  # a failure in the middle is the point
    assert path.read_bytes() == b"old"
