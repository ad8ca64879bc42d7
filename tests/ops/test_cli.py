"""The command line as a whole: targets by -H, exit codes, JSON, and no traceback for what can be foreseen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dflash_ops import console
from dflash_ops.agent.runs import Latest, RunStatus
from tests.ops.conftest import Lab

TWO = """\
default: local
targets:
  local: {{via: local, root: {root}, min_free_gib: 0, launcher: nohup}}
  second: {{via: local, root: {root}-2, min_free_gib: 0, launcher: nohup}}
  broken: {{via: local, root: {root}-3, python: /nonexistent/python}}
"""


def test_every_verb_is_listed_with_a_line_of_help(lab: Lab) -> None:
    done = lab.fab("--list")
    assert done.returncode == 0
    for verb in [
        "attach",
        "clear-cache",
        "deploy",
        "gpus",
        "launch",
        "preflight",
        "releases",
        "rollback",
        "runs",
        "status",
        "stop",
        "tail-log",
    ]:
        line = next(line for line in done.stdout.splitlines() if line.split()[:1] == [verb])
        assert len(line.split()) > 3


@pytest.mark.parametrize("verb", ["deploy", "launch", "status", "stop", "tail-log", "rollback", "clear-cache"])
def test_a_hostile_hosts_file_stops_every_verb_before_it_does_anything(lab: Lab, verb: str) -> None:
    lab.hosts_file.write_text(lab.hosts_file.read_text() + '  ct200: {via: pct, ssh: {host: h}, vmid: "200; reboot"}\n')
    done = lab.fab(verb)
    assert done.returncode == 2
    assert "hosts.yaml:9: targets.ct200.vmid" in done.stderr
    assert "Traceback" not in done.stderr
    assert not lab.root.exists()


def test_another_hosts_file_by_environment(lab: Lab) -> None:
    other = lab.checkout / "other.yaml"
    lab.hosts_file.rename(other)
    assert lab.fab("status").returncode == 2
    lab.extra["DFLASH_HOSTS_FILE"] = str(other)
    assert lab.fab("status").returncode == 0


class TestTargets:
    @pytest.fixture(autouse=True)
    def _two(self, lab: Lab) -> None:
        lab.hosts_file.write_text(TWO.format(root=lab.root))

    def test_several_give_one_table_and_the_worst_code(self, lab: Lab) -> None:
        assert lab.fab("-H", "second", "deploy", "launch", "--set", "standin.mode=crash").returncode == 0
        lab.fab("-H", "second", "tail-log")
        done = lab.fab("-H", "local,second", "status")
        assert done.returncode == 30
        rows = [line.split()[:2] for line in done.stdout.splitlines()]
        assert rows == [["target", "state"], ["local", "no"], ["second", "failed"]]

    def test_one_broken_target_does_not_hide_the_others(self, lab: Lab) -> None:
        done = lab.fab("-H", "broken,local", "status", "--json")
        assert done.returncode == 14
        bodies = [json.loads(line) for line in done.stdout.splitlines()]
        assert bodies[0]["error"]["kind"] == "AgentFailed"
        assert bodies[1]["target"] == "local"
        assert "[broken] error: cannot run /nonexistent/python" in done.stderr

    def test_a_chain_runs_on_the_named_target_only(self, lab: Lab) -> None:
        assert lab.fab("-H", "second", "deploy").returncode == 0
        assert not lab.root.exists()
        assert Path(f"{lab.root}-2").exists()

    def test_unknown_names_and_bare_commands_are_refused(self, lab: Lab) -> None:
        done = lab.fab("-H", "secund", "status")
        assert done.returncode == 2
        assert "did you mean 'second'" in done.stderr
        assert lab.fab("-H", "local", "status", "--", "reboot").returncode == 2
        assert lab.fab("-H", "local,second", "tail-log").returncode == 2

    @pytest.mark.parametrize("names", ["", ",", " "])
    def test_an_empty_name_is_not_the_default_target(self, lab: Lab, names: str) -> None:
        """`fab -H "$NAME" stop` with NAME unset. Shown able to fail: it acted on the default target."""
        done = lab.fab("-H", names, "stop")
        assert (done.returncode, "-H names no target" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("runs", "--limit", "abc"), 2),
        (("stop", "--wait=-1"), 2),
        (("stop", "--run", "nonsense"), 2),
        (("status", "--run", "../../etc/passwd"), 2),
        (("rollback", "--to", "zzz"), 2),
        (("rollback",), 2),
        (("releases",), 0),
        (("runs",), 0),
        (("stop",), 0),
        (("gpus",), 0),
        (("preflight",), 0),
    ],
)
def test_on_an_empty_target(lab: Lab, words: tuple[str, ...], code: int) -> None:
    done = lab.fab(*words)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_a_root_that_cannot_be_made_is_said(lab: Lab) -> None:
    lab.root.parent.mkdir(exist_ok=True)
    lab.root.write_text("a file")
    done = lab.fab("deploy")
    assert done.returncode == 24
    assert "root:" in done.stderr
    assert "Traceback" not in done.stderr


AS_NOBODY = """\
#!/bin/sh
exec setpriv --reuid=65534 --regid=65534 --clear-groups {python} "$@"
"""
SYSTEM_PYTHON = Path("/usr/bin/python3")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
@pytest.mark.parametrize("verb", ["status", "runs", "releases", "stop", "tail-log", "deploy", "launch"])
def test_directories_that_belong_to_somebody_else_are_said(lab: Lab, verb: str) -> None:
    """Shown able to fail: most verbs called a permission that is missing a bug of the agent, exit code 14."""
    if subprocess.run(
        [SYSTEM_PYTHON, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"], check=False
    ).returncode:
        pytest.skip("no Python here that another user may run")
    lab.root.parent.chmod(0o755)
    lab.root.mkdir(mode=0o777)
    lab.root.chmod(0o777)
    python = lab.root.parent / "python"
    python.write_text(AS_NOBODY.format(python=SYSTEM_PYTHON))
    python.chmod(0o755)
    for name in ("runs", "releases"):
        (lab.root / name).mkdir(mode=0o700)
    (lab.root / "current").symlink_to(f"releases/{'0' * 16}")
    lab.hosts_file.write_text(lab.hosts_file.read_text() + f"    python: {python}\n")
    done = lab.fab(verb)
    assert done.returncode in ((24,) if verb != "launch" else (23, 24)), done.stderr
    assert "bug" not in done.stderr
    assert "Traceback" not in done.stderr


def test_reading_verbs_speak_json(lab: Lab) -> None:
    lab.deploy()
    lab.start()
    lab.wait_for("finished")
    for verb in ("status", "runs", "releases", "gpus", "preflight"):
        body = json.loads(lab.fab(verb, "--json").stdout)
        assert body["target"] == "local"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("statsu", "no verb 'statsu', did you mean 'status'?"),
        ("status --nope", "no flag --nope"),
        ("--nosuch", "no flag --nosuch"),
        ("launch --variant", "--variant needs a value"),
        ("launch --keep-alive", "--keep-alive needs a value"),
        ("launch --set", "--set needs a value"),
        ("launch --set --keep-cache", "--set needs a value"),
        ("report", "report needs 'run'"),
        ("report", "`fab --help report` says what goes there"),
        ("--help statsu", "no verb 'statsu'"),
        ("stop --kill=yes", "no verb 'yes'"),
    ],
)
def test_words_that_fab_does_not_know_exit_2(lab: Lab, words: str, says: str) -> None:
    """Shown able to fail: without `usage_exits_2` in fabfile.py each ends with 1, `launch --set` is taken."""
    done = lab.fab(*words.split())
    assert done.returncode == 2
    assert says in done.stderr
    assert "fab --list" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("state", ["failed", "finished"])
def test_a_failed_run_says_why_in_its_status(state: str) -> None:
    """The trainer's own words, not only "exit code 1". Shown able to fail: without the line in `describe_run`."""
    latest = Latest(end={"reason": "error", "error": "data.source '/nope' does not exist"})
    run = RunStatus("r", state, "exit code 1 (error)", "sdpa", "5f0c", 0.0, "/d", "/d/log", "tmux", "s", latest=latest)
    lines = console.describe_run(run)
    assert ("why      data.source '/nope' does not exist" in lines) == (state == "failed")
