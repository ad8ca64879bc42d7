"""The stand-in pct does what the real one does. Each test is one property that a caller of the real tool meets.

Shown able to fail: with parsing stopped at the first plain word, with PATH left alone, and with push reporting its
worker's failure, the tests of these went red.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.sandbox.box import Box
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.sandbox


def pct(box: Box, *argv: str, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [str(box.pct), *argv],
        input=stdin,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, **env},
    )


class TestOptions:
    def test_without_a_double_dash_the_commands_options_are_taken(self, box: Box) -> None:
        done = pct(box, "exec", "200", "ls", "-la")
        assert done.returncode == 255
        assert b"Unknown option: la" in done.stderr
        assert b"400 unable to parse option" in done.stderr

    def test_abbreviations_eat_arguments_silently(self, box: Box) -> None:
        done = pct(box, "exec", "200", "bash", "-e", "-c", "echo hi")
        assert done.returncode == 127  # it ran: bash 'echo hi'

    def test_options_may_stand_anywhere_and_be_short(self, box: Box) -> None:
        for words in (["--keep-env", "0", "200"], ["200", "--keep-env=0"], ["200", "-keep", "0"]):
            done = pct(box, "exec", *words, "--", "/usr/bin/env", SECRET="x")
            assert done.returncode == 0
            assert b"SECRET" not in done.stdout

    def test_only_the_first_double_dash_is_swallowed(self, box: Box) -> None:
        assert pct(box, "exec", "200", "--", "printf", "%s|", "--", "a").stdout == b"--|a|"

    def test_an_old_version_knows_no_keep_env(self, box: Box) -> None:
        box.settings(keep_env=False)
        done = pct(box, "exec", "200", "--keep-env", "0", "--", "true")
        assert (done.returncode, b"Unknown option: keep-env" in done.stderr) == (255, True)


class TestExec:
    def test_arguments_and_stdin_arrive_untouched(self, box: Box) -> None:
        words = ["a b", "'", '"', "$HOME", ";", "\n", "", "é", "--", "-e"]
        done = pct(box, "exec", "200", "--", "/usr/bin/python3", "-c", "import sys; print(sys.argv[1:])", *words)
        assert done.stdout.decode().strip() == repr(words)
        data = os.urandom(1 << 20)
        assert pct(box, "exec", "200", "--", "cat", stdin=data).stdout == data

    def test_builtins_and_strings_are_no_commands(self, box: Box) -> None:
        for argv in (["cd", "/"], ["ls /"]):
            done = pct(box, "exec", "200", "--", *argv)
            assert done.returncode == 127
            assert b"Failed to exec" in done.stderr

    @pytest.mark.parametrize("code", [0, 1, 3, 255])
    def test_the_commands_own_code(self, box: Box, code: int) -> None:
        assert pct(box, "exec", "200", "--", "sh", "-c", f"exit {code}").returncode == code

    def test_death_by_signal_is_128_and_more(self, box: Box) -> None:
        assert pct(box, "exec", "200", "--", "sh", "-c", "kill -9 $$").returncode == 137

    def test_the_callers_environment_goes_along_with_a_poor_path(self, box: Box) -> None:
        lines = pct(box, "exec", "200", "--", "/usr/bin/env", SECRET="x").stdout.decode().splitlines()
        assert "SECRET=x" in lines
        assert "PATH=/sbin:/bin:/usr/sbin:/usr/bin" in lines

    def test_keep_env_0_has_no_home(self, box: Box) -> None:
        lines = pct(box, "exec", "200", "--keep-env", "0", "--", "/usr/bin/env").stdout.decode().splitlines()
        assert not [line for line in lines if line.startswith(("HOME=", "SECRET="))]
        assert "container=lxc" in lines

    def test_nothing_to_run(self, box: Box) -> None:
        for words in ([], ["--"]):
            done = pct(box, "exec", "200", *words)
            assert done.returncode != 0
            assert b"missing command at" in done.stderr


class TestFailures:
    def test_missing_container(self, box: Box) -> None:
        for command in ("exec", "status", "start"):
            done = pct(box, command, "999", *(["--", "true"] if command == "exec" else []))
            assert done.returncode == 2
            assert done.stderr == b"Configuration file 'nodes/pve/lxc/999.conf' does not exist\n"

    def test_stopped_container(self, box: Box) -> None:
        assert pct(box, "stop", "200").returncode == 0
        assert pct(box, "status", "200").stdout == b"status: stopped\n"
        done = pct(box, "exec", "200", "--", "true")
        assert done.returncode != 0
        assert done.stderr == b"container '200' not running!\n"
        assert pct(box, "start", "200").returncode == 0
        assert pct(box, "status", "200").stdout == b"status: running\n"

    def test_start_of_a_running_or_locked_container(self, box: Box) -> None:
        assert pct(box, "start", "200").returncode == 255
        conf = box.container.home / "pve.conf"
        plain = conf.read_text()
        try:
            conf.write_text(plain + "lock: backup\n")
            assert pct(box, "stop", "200").stderr == b"CT is locked (backup)\n"
            assert pct(box, "exec", "200", "--", "true").returncode == 0  # exec takes no lock
        finally:
            conf.write_text(plain)

    @pytest.mark.parametrize("words", [["frobnicate", "200"], [], ["exec"], ["exec", "abc", "--", "true"]])
    def test_misuse_is_255(self, box: Box, words: list[str]) -> None:
        assert pct(box, *words).returncode == 255


class TestLists:
    def test_list_and_config_and_status(self, box: Box) -> None:
        header, row = pct(box, "list").stdout.decode().splitlines()
        assert header.split() == ["VMID", "Status", "Lock", "Name"]
        assert row.split() == ["200", "running", "ct200"]
        assert "hostname: ct200" in pct(box, "config", "200").stdout.decode()
        assert "uptime: " in pct(box, "status", "200", "--verbose").stdout.decode()


class TestPush:
    def test_success_and_a_failure_that_says_success(self, box: Box, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.write_bytes(b"x" * 100)
        assert pct(box, "push", "200", str(source), "/root/pushed", "--perms", "600").returncode == 0
        assert box.container.run("stat", "-c", "%s %a", "/root/pushed").split() == ["100", "600"]
        assert pct(box, "push", "200", str(tmp_path / "absent"), "/root/other").returncode == 0
        assert pct(box, "push", "200", str(source), "/no/such/folder/x").returncode == 0

    def test_a_short_write_is_not_noticed(self, box: Box, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.write_bytes(b"x" * (3 << 20))
        box.container.run("mkdir", "-p", "/root/small")
        box.container.run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/root/small")
        try:
            assert pct(box, "push", "200", str(source), "/root/small/x").returncode == 0
            assert int(box.container.run("stat", "-c", "%s", "/root/small/x")) < (3 << 20)
        finally:
            box.container.run("umount", "/root/small")
