"""What an operator sees when a layer fails: the right exit code, what, why and what to do next; never a traceback.

Shown able to fail: with `explain` returning AgentFailed for all, with boot ids ignored, and with the first code taken
for the worst, the tests of these went red.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.checkout import REPOSITORY
from tests.fixtures.fake_nvidia_smi import BUSY, IDLE, install
from tests.sandbox.box import Box, descendants
from tests.sandbox.laptop import Laptop
from tests.sandbox.test_tail import start_run
from tests.waiting import wait_until

pytestmark = pytest.mark.sandbox


def refused(laptop: Laptop, code: int, *needles: str, words: tuple[str, ...] = ("status",)) -> str:
    done = laptop.fab(*words)
    text = done.stdout + done.stderr
    assert done.returncode == code, text
    assert "Traceback" not in text
    for needle in ("error: ", *needles):
        assert needle in text
    return text


class TestRoute:
    def test_host_unreachable(self, laptop: Laptop) -> None:
        laptop.write_hosts(ssh={"port": 1})
        refused(laptop, 10, "cannot connect", "next: ", "runbook: ")

    def test_key_not_authorised(self, laptop: Laptop) -> None:
        laptop.write_hosts(ssh={"identity": str(laptop.box.sshd.home / "host_key")})
        refused(laptop, 10, "refuses our keys")

    def test_unknown_key_then_trust(self, laptop: Laptop) -> None:
        laptop.known_hosts.unlink()
        print_ = laptop.box.sshd.fingerprint()
        refused(laptop, 11, "unknown host key", print_, "trust")
        refused(laptop, 2, "nobody is there", words=("trust",))
        refused(laptop, 11, "does not match", words=("trust", "--fingerprint", "SHA256:" + "x" * 43))
        assert not laptop.known_hosts.exists()
        assert laptop.fab("trust", "--fingerprint", print_).returncode == 0
        assert laptop.fab("status").returncode == 0
        assert "already" in laptop.fab("trust").stdout

    def test_changed_key_then_trust_with_replace(self, laptop: Laptop) -> None:
        sshd = laptop.box.sshd
        sshd.stop()
        sshd.new_host_key()
        sshd.start()
        refused(laptop, 11, "CHANGED", sshd.fingerprint())
        refused(laptop, 11, "CHANGED", words=("trust", "--fingerprint", sshd.fingerprint()))
        assert laptop.fab("trust", "--replace", "--fingerprint", sshd.fingerprint()).returncode == 0
        assert laptop.fab("status").returncode == 0

    def test_no_pct_on_the_host(self, laptop: Laptop) -> None:
        laptop.write_hosts(pct="/usr/sbin/no-pct")
        refused(laptop, 12, "has no /usr/sbin/no-pct")

    def test_no_such_container(self, laptop: Laptop) -> None:
        laptop.write_hosts(vmid=999)
        refused(laptop, 12, "container 999 does not exist")

    def test_stopped_container(self, laptop: Laptop) -> None:
        laptop.box.container.stop()
        refused(laptop, 13, "container 200 is not running", "pct start 200")

    def test_no_python(self, laptop: Laptop) -> None:
        laptop.write_hosts(python="/opt/no/python")
        refused(laptop, 14, "/opt/no/python")

    def test_a_program_that_is_no_python(self, laptop: Laptop) -> None:
        laptop.write_hosts(python="/bin/false")
        refused(laptop, 14, "no answer")

    @pytest.mark.parametrize("value", ["101; reboot", "-e", "200\n", "0200"])
    def test_hostile_hosts_file_is_refused_before_any_connection(self, laptop: Laptop, value: str) -> None:
        before = laptop.box.sshd.log
        laptop.write_hosts(vmid=value)
        refused(laptop, 2, "hosts.yaml")
        assert laptop.box.sshd.log == before


class TestNoise:
    def test_a_host_whose_bashrc_prints(self, laptop: Laptop) -> None:
        noise = laptop.box.sshd.home / "root" / ".bashrc"
        noise.write_text("echo welcome to pve; printf 'no newline, and @dflash: too'; echo on stderr >&2\n")
        try:
            done = laptop.fab("deploy")
            assert done.returncode == 0, done.stdout + done.stderr
            done = laptop.fab("releases", "--json")
            assert done.returncode == 0
            assert done.stdout.startswith("{")
        finally:
            noise.unlink()


class TestWrapper:
    """The wrapper that docs/security.md gives a plain user, word for word but for pct's place."""

    @pytest.fixture
    def wrapper(self, laptop: Laptop) -> str:
        text = (REPOSITORY / "docs" / "security.md").read_text()
        block = text.partition("# /usr/local/sbin/dflash-pct")[2].partition("# /etc/sudoers.d")[0]
        lines = [line.removeprefix(" " * 8) for line in block.splitlines()[1:]]
        path = laptop.home / "dflash-pct"
        path.write_text("\n".join(lines).replace("/usr/sbin/pct", str(laptop.box.pct)) + "\n")
        path.chmod(0o755)
        return str(path)

    def test_it_lets_the_tool_through(self, laptop: Laptop, wrapper: str) -> None:
        laptop.write_hosts(pct=wrapper)
        done = laptop.fab("status")
        assert done.returncode == 0, done.stdout + done.stderr

    @pytest.mark.parametrize(
        "words",
        [
            ["exec", "201", "--", "true"],
            ["exec", "200", "true"],
            ["exec", "200", "--extra-args", "x", "--", "true"],
            ["stop", "200"],
            ["status", "200 201"],
            [],
        ],
    )
    def test_and_nothing_else(self, wrapper: str, words: list[str]) -> None:
        assert subprocess.run([wrapper, *words], capture_output=True, check=False).returncode == 126


class TestContainer:
    def test_restarted_under_a_run(self, laptop: Laptop) -> None:
        remote, _ = start_run(laptop, "standin.steps=1000000", "standin.interval=0.1")
        wait_until(lambda: laptop.status(remote).state == "training", "the run trains")
        laptop.box.container.stop()
        laptop.box.container.start()
        done = laptop.fab("status")
        assert done.returncode == 31, done.stdout + done.stderr
        assert "lost" in done.stdout
        assert "restarted" in done.stdout

    def test_several_targets_one_table_worst_code(self, laptop: Laptop) -> None:
        laptop.box.add_container(201).start()
        try:
            names = {"ct200": 200, "ct201": 201, "ct999": 999}
            laptop.write_hosts({name: laptop.settings(vmid=vmid) for name, vmid in names.items()})
            done = laptop.fab("-H", "ct200,ct201", "status")
            assert done.returncode == 0, done.stderr
            assert [line.split()[0] for line in done.stdout.splitlines()] == ["target", "ct200", "ct201"]
            done = laptop.fab("-H", "ct200,ct999,ct201", "status")
            assert done.returncode == 12
            assert [line.split()[0] for line in done.stdout.splitlines()] == ["target", "ct200", "ct201"]
            assert "[ct999] error: container 999" in done.stderr
        finally:
            laptop.box.containers.pop(201).remove()


class TestGpuGate:
    """A fake nvidia-smi on the host and in the container; processes, cgroups and pids are real."""

    @pytest.fixture(autouse=True)
    def gpus(self, laptop: Laptop) -> None:
        laptop.write_hosts(gpus={"count": 1}, idle={"samples": 1})
        self.inside = laptop.box.container.rootfs / "usr/local/bin"
        self.host = laptop.box.sshd.home / "bin"

    @pytest.fixture(autouse=True)
    def removed(self, gpus: None, box: Box) -> object:
        yield
        for directory in (self.inside, self.host):
            for name in ("nvidia-smi", "scenario.json", "gpus.calls", "apps.calls", "table.calls"):
                (directory / name).unlink(missing_ok=True)

    def test_idle_needs_both(self, laptop: Laptop) -> None:
        install(self.inside, IDLE)
        install(self.host, IDLE)
        done = laptop.fab("gpus")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "seen from container and host" in done.stdout
        install(self.host, {**IDLE, "table": ""})
        done = laptop.fab("gpus")
        assert (done.returncode, "host's nvidia-smi printed no process table" in done.stdout) == (20, True)

    def test_a_process_of_a_guest_is_named_by_guest_and_inner_pid(self, laptop: Laptop) -> None:
        with subprocess.Popen(
            ["lxc-attach", "-P", str(laptop.box.home / "lxc"), "-n", "200", "--", "sleep", "604"]
        ) as job:
            # lxc-attach's own helpers come and go before it.
            (outer,) = wait_until(
                lambda: [pid for pid in descendants(job.pid) if name_of(pid) == "sleep"], "the process runs"
            )
            (inner,) = laptop.box.container.pids("sleep", "604")
            busy = {kind: _with_pid(answer, outer) for kind, answer in BUSY.items()}
            install(self.host, busy)
            install(self.inside, IDLE)
            done = laptop.fab("gpus")
            laptop.box.container.run("kill", str(inner))
        assert done.returncode == 20
        assert f"python3 (pid {outer} of guest lxc/200, pid {inner} inside) holds 4614 MiB [host]" in done.stdout

    def test_a_hidden_process_and_a_launch(self, laptop: Laptop) -> None:
        install(self.host, IDLE)
        install(self.inside, {**IDLE, "table": "| Processes: |\n|====|\n"})
        done = laptop.fab("deploy", "launch", "--variant", "sdpa", "--set", "standin.steps=1")
        assert done.returncode in (20, 24), done.stdout + done.stderr

    def test_a_host_whose_nvidia_smi_fails(self, laptop: Laptop) -> None:
        install(self.inside, IDLE)
        install(self.host, {**IDLE, "gpus": {"code": 18, "text": "Failed to initialize NVML: Unknown Error\n"}})
        done = laptop.fab("gpus")
        assert (done.returncode, "Unknown Error" in done.stdout) == (20, True)


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _with_pid(answer: str, pid: int) -> str:
    from tests.fixtures.fake_nvidia_smi import RECORDINGS

    text = (RECORDINGS / answer[1:]).read_text()
    return text.replace(", 430,", f", {pid},").replace("    430      C", f"{pid:>7}      C")
