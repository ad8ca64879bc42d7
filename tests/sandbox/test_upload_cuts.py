"""A deploy that is cut, at any byte, leaves the target as it was; the next one succeeds and leaves no rest.

Shown able to fail: with an incomplete upload taken for whole, with `.partial` left by the agent, and with `.partial`
not swept, these went red.
"""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Callable, Iterator

import pytest

from dflash_ops import release
from dflash_ops.agent.releases import damage
from dflash_ops.errors import EnvironmentUnfit, OpsError
from dflash_ops.remote import Remote
from dflash_ops.transport.ssh import SshTransport
from tests.sandbox.box import send
from tests.sandbox.laptop import Laptop
from tests.sandbox.valve import valve
from tests.waiting import wait_until

pytestmark = pytest.mark.sandbox
SIZE = 1_500_000


@contextlib.contextmanager
def quiet(_title: str, _total: int) -> Iterator[Callable[[int], None]]:
    yield lambda _sent: None


def change(laptop: Laptop, seed: int, size: int = SIZE) -> release.Release:
    """A new version of the trainer: a file that does not compress, so that the upload has a size."""
    (laptop.checkout / "trainer" / "data" / "blob.bin").write_bytes(random.Random(seed).randbytes(size))
    return release.collect(laptop.checkout)


def deploy(remote: Remote, new: release.Release, upload: release.Upload = quiet) -> release.Deployment:
    return release.deploy(remote, new, "test", lambda _text: None, upload)


def current(laptop: Laptop) -> str:
    return laptop.layout.current.readlink().name


def rests(laptop: Laptop) -> list[str]:
    return [path.name for path in laptop.layout.releases.iterdir() if path.name.endswith(".partial")]


class Cut:
    """An upload whose route breaks once `offset` bytes have left."""

    def __init__(self, laptop: Laptop, remote: Remote, victim: str, offset: int) -> None:
        self.laptop, self.remote, self.victim, self.offset = laptop, remote, victim, offset
        self.total = 0
        self.sent = 0

    @contextlib.contextmanager
    def __call__(self, _title: str, total: int) -> Iterator[Callable[[int], None]]:
        self.total = total
        yield self.on_sent

    def on_sent(self, sent: int) -> None:
        self.sent = sent
        if sent < self.offset:
            return
        if self.victim == "server":
            for pid in self.laptop.box.sshd.sessions():
                send(pid, signal.SIGKILL)
        else:
            host = self.remote.transport.host()
            assert isinstance(host, SshTransport)
            host.link.cut()


class TestCuts:
    @pytest.mark.parametrize("victim", ["client", "server"])
    def test_at_25_random_bytes(self, laptop: Laptop, victim: str) -> None:
        remote = laptop.remote()
        before = deploy(remote, change(laptop, 0)).release_id
        dice = random.Random(f"{victim} cuts")
        cuts = 0
        for turn in range(1, 26):
            new = change(laptop, turn)
            cut = Cut(laptop, remote, victim, dice.randrange(SIZE))
            try:
                deploy(remote, new, cut)
            except OpsError:
                cuts += 1
            # With the last bytes through, the far side may have all of it: then the release is in use, and whole. Its
            # agent works on after the cut.
            if cut.sent >= cut.total:
                wait_until(lambda: not laptop.box.container.pids(laptop.root, "install"), "the agent has ended")
            whole = before if cut.sent < cut.total else current(laptop)
            assert current(laptop) == whole
            assert damage(laptop.layout, whole) is None
            before = whole
        assert cuts > 20
        done = deploy(remote, change(laptop, 0))
        assert current(laptop) == done.release_id
        assert not rests(laptop)

    def test_the_client_is_killed(self, laptop: Laptop) -> None:
        first = deploy(laptop.remote(), change(laptop, 0)).release_id
        # Of 8 MB at most the valve's 1 MB and a window of SSH (2 MiB) can leave the client before it is killed.
        new = change(laptop, 1, 8_000_000).release_id
        sshd = laptop.box.sshd
        with valve((sshd.address, sshd.port), 1_000_000) as held:
            with laptop.known_hosts.open("a") as file:
                file.write(sshd.known_hosts_line(held.port))
            laptop.write_hosts(ssh={"port": held.port})
            process = laptop.start_fab("deploy")
            wait_until(lambda: held.passed == 1_000_000 and rests(laptop), "the upload stands in the middle")
            assert process.poll() is None
            process.kill()
            process.wait()
            wait_until(lambda: not rests(laptop), "the partial upload is removed by the agent itself")
            assert current(laptop) == first
            held.open()
            done = laptop.fab("deploy")
            assert done.returncode == 0, done.stderr
            assert current(laptop) == new
            assert held.passed > 8_000_000

    def test_what_a_killed_agent_leaves_is_swept_by_the_next_deploy(self, laptop: Laptop) -> None:
        remote = laptop.remote()
        deploy(remote, change(laptop, 0))
        rest = laptop.layout.releases / "0123456789abcdef.partial"
        (rest / "trainer").mkdir(parents=True)
        deploy(remote, change(laptop, 1))
        assert not rests(laptop)


class TestFullDisk:
    def test_refused_beforehand(self, laptop: Laptop) -> None:
        with self.small_disk(laptop, "1m") as remote, pytest.raises(EnvironmentUnfit, match="no room"):
            deploy(remote, change(laptop, 1))

    def test_filled_by_someone_else_in_the_middle(self, laptop: Laptop) -> None:
        fill = f"head -c 60m /dev/zero >{laptop.root}/releases/x"

        @contextlib.contextmanager
        def filling(_title: str, _total: int) -> Iterator[Callable[[int], None]]:
            filled: list[str] = []

            def on_sent(sent: int) -> None:
                # More than a window and all pipes on the way hold: the far side has begun to unpack.
                if sent > 5_000_000 and not filled:
                    filled.append(fill)
                    laptop.box.container.run("sh", "-c", fill, check=False)

            yield on_sent

        with self.small_disk(laptop, "40m") as remote:
            with pytest.raises(EnvironmentUnfit) as caught:
                deploy(remote, change(laptop, 1, 9_000_000), filling)
            assert "space" in f"{caught.value.what} {caught.value.why}"

    @contextlib.contextmanager
    def small_disk(self, laptop: Laptop, size: str) -> Iterator[Remote]:
        """The releases on a disk of this size; afterwards nothing has changed and the next deploy works."""
        remote, container = laptop.remote(), laptop.box.container
        first = deploy(remote, release.collect(laptop.checkout)).release_id
        releases, kept = f"{laptop.root}/releases", f"{laptop.root}/kept"
        container.run("cp", "-a", releases, kept)
        container.run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", releases)
        try:
            container.run("sh", "-c", f"cp -a {kept}/* {releases}/")
            yield remote
            assert container.run("readlink", f"{laptop.root}/current").strip().endswith(first)
            assert ".partial" not in container.run("ls", releases)
        finally:
            container.run("umount", releases)
        assert deploy(remote, change(laptop, 2)).sent > 0
