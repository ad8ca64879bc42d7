"""Releases: content decides the id, an upload is whole or it never was, `current` moves last."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import subprocess
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops import console
from dflash_ops import release as releasing
from dflash_ops.agent import compiled, process, releases, retire, runs
from dflash_ops.agent.layout import Layout, linked_release
from dflash_ops.agent.manifest import Manifest, ReleasedFile
from dflash_ops.agent.messages import InstallRequest
from dflash_ops.agent.runs import RunRecord
from dflash_ops.errors import EnvironmentUnfit, OpsError, SyntaxCheckFailed, UploadCorrupt, UsageError
from dflash_ops.release import Release
from tests.ops import standin
from tests.ops.conftest import Lab
from tests.waiting import PATIENCE_S, wait_until

names = st.from_regex(r"\A[a-z_]{1,8}\Z")
trees = st.dictionaries(
    st.builds(lambda parts, name: "/".join(["trainer", *parts, name]), st.lists(names, max_size=2), names),
    st.binary(max_size=200),
    min_size=1,
    max_size=6,
)


def made(tree: dict[str, bytes]) -> Release:
    pairs = [
        (ReleasedFile(path, len(data), hashlib.sha256(data).hexdigest()), data) for path, data in sorted(tree.items())
    ]
    return Release(Manifest(tuple(file for file, _ in pairs)), tuple(data for _, data in pairs))


def target(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "root", tmp_path / "root")
    layout.create()
    return layout


def install(layout: Layout, release: Release, payload: bytes | None = None, size: int | None = None) -> None:
    data = release.tar() if payload is None else payload
    releases.install(layout, release.manifest, io.BytesIO(data), len(data) if size is None else size, lambda _: None)


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


FIRST = made({"trainer/__init__.py": b"A = 1\n", "trainer/a/b.py": b"B = 2\n", "trainer/blob": bytes(5000)})
SECOND = made({"trainer/__init__.py": b"A = 2\n", "trainer/a/b.py": b"B = 2\n", "trainer/blob": os.urandom(20_000)})


class TestIdentity:
    @given(trees)
    def test_same_content_same_id_same_bytes(self, tree: dict[str, bytes]) -> None:
        again = made(dict(reversed(list(tree.items()))))
        assert made(tree).release_id == again.release_id
        assert made(tree).tar() == again.tar()

    @given(trees, st.data())
    def test_any_change_changes_the_id(self, tree: dict[str, bytes], data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(tree)))
        before = made(tree).release_id
        assert made({**tree, path: tree[path] + b"x"}).release_id != before
        assert made({**tree, f"{path}x": b""}).release_id != before
        assert made({key: value for key, value in tree.items() if key != path}).release_id != before

    def test_a_checkout_is_read_without_what_does_not_belong(self, tmp_path: Path) -> None:
        package = standin.write(tmp_path)
        clean = releasing.collect(tmp_path)
        (package / "__pycache__").mkdir()
        (package / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"x")
        (package / "y.pyc").write_bytes(b"y")
        os.utime(package / "__main__.py", (1, 1))
        assert releasing.collect(tmp_path).release_id == clean.release_id
        (package / "data" / "__init__.py").unlink()  # a file that is gone here must be gone in the next release
        assert "trainer/data/__init__.py" not in [file.path for file in releasing.collect(tmp_path).manifest.files]

    def test_links_and_unsafe_names_are_refused_before_anything_is_sent(self, tmp_path: Path) -> None:
        package = standin.write(tmp_path)
        (package / "link.py").symlink_to("/etc/passwd")
        with pytest.raises(UsageError, match="symbolic link"):
            releasing.collect(tmp_path)
        (package / "link.py").unlink()
        (package / "-rf").write_text("")
        with pytest.raises(UsageError, match="unsafe"):
            releasing.collect(tmp_path)


class TestUpload:
    def test_cut_at_any_byte_leaves_current_and_the_next_deploy_works(self, tmp_path: Path) -> None:
        """Shown able to fail: without the size check a cut in the tar's last, all-zero blocks passed."""
        layout = target(tmp_path)
        install(layout, FIRST)
        data = SECOND.tar()
        edges = [at for base in range(0, len(data), 512) for at in (base, base + 1, base + 511)]
        for cut in [at for at in edges if at < len(data)]:
            with pytest.raises(UploadCorrupt):
                install(layout, SECOND, data[:cut], len(data))
            assert linked_release(layout.current) == FIRST.release_id
            assert [path.name for path in layout.releases.iterdir()] == [FIRST.release_id]
        install(layout, SECOND)
        assert linked_release(layout.current) == SECOND.release_id
        assert linked_release(layout.previous) == FIRST.release_id
        assert releases.damage(layout, SECOND.release_id) is None

    @given(st.integers(0, 10**6), st.integers(1, 255))
    def test_any_altered_byte_of_content_is_found(self, at: int, change: int) -> None:
        data = bytearray(FIRST.tar())
        data[at % len(data)] ^= change
        with contextlib.ExitStack() as stack:
            import tempfile

            layout = target(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            try:
                install(layout, FIRST, bytes(data))
            except UploadCorrupt:
                assert linked_release(layout.current) is None
            else:  # a byte of padding or of an unused header field: what counts is what was stored
                assert releases.damage(layout, FIRST.release_id) is None

    def test_hostile_members_are_refused(self, tmp_path: Path) -> None:
        layout = target(tmp_path)
        link = tarfile.TarInfo("trainer/__init__.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        device = tarfile.TarInfo("trainer/__init__.py")
        device.type = tarfile.CHRTYPE
        for member in (
            link,
            device,
            tarfile.TarInfo("/etc/x"),
            tarfile.TarInfo("trainer/../../x"),
            tarfile.TarInfo("x"),
        ):
            with pytest.raises(UploadCorrupt):
                install(layout, FIRST, tar_of((member, b"")))
        twice = tar_of(*[(tarfile.TarInfo("trainer/__init__.py"), b"A = 1\n")] * 2)
        with pytest.raises(UploadCorrupt):
            install(layout, FIRST, twice)

    @pytest.mark.parametrize(
        "path", ["/trainer/x", "trainer/../x", "other/x", "trainer", "trainer//x", "", "trainer/-x", "trainer/a\nb"]
    )
    def test_hostile_paths_in_the_manifest_are_refused(self, tmp_path: Path, path: str) -> None:
        file = replace(FIRST.manifest.files[0], path=path)
        with pytest.raises(UploadCorrupt):
            install(target(tmp_path), Release(Manifest((file,)), (b"A = 1\n",)), FIRST.tar())

    def test_full_disk_is_said_and_current_stays(self, tmp_path: Path) -> None:
        layout = target(tmp_path)
        install(layout, FIRST)
        script = (
            "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
        )
        # A file size limit fails in the same place as a full disk: in write, with an OSError.
        code = f"""
{script}
from pathlib import Path
from tests.ops.test_release import SECOND_AGAIN, install, Layout
from dflash_ops.errors import EnvironmentUnfit
try:
    install(Layout(Path({str(layout.root)!r}), Path({str(layout.root)!r})), SECOND_AGAIN)
except EnvironmentUnfit as error:
    print(error.what)
"""
        done = subprocess.run(
            [os.sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
        )
        assert "the disk" in done.stdout, done.stderr
        assert linked_release(layout.current) == FIRST.release_id
        assert [path.name for path in layout.releases.iterdir()] == [FIRST.release_id]

    def test_too_little_room_is_refused_before_a_byte_is_written(self, tmp_path: Path) -> None:
        huge = Release(Manifest((ReleasedFile("trainer/x", 10**15, "0" * 64),)), (b"",))
        with pytest.raises(EnvironmentUnfit, match="no room"):
            install(target(tmp_path), huge, b"")

    def test_a_syntax_error_names_file_and_line_and_leaves_current(self, tmp_path: Path) -> None:
        layout = target(tmp_path)
        install(layout, FIRST)
        for text, where in (
            (b"a = 1\nb = (\n", "trainer/x.py:2"),
            (b"a\0b", "trainer/x.py:1"),
            (b'a = "\xff"\n', "trainer/x.py:1"),
        ):
            with pytest.raises(SyntaxCheckFailed) as caught:
                install(layout, made({"trainer/x.py": text}))
            assert caught.value.what.startswith(where)
            assert linked_release(layout.current) == FIRST.release_id

    def test_many_at_once_end_with_one_whole_release(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(releases, "DEPLOY_WAIT_S", PATIENCE_S)  # a slow disk syncs eight times
        layout = target(tmp_path)
        problems: list[OpsError] = []

        def deploy() -> None:
            try:
                if not releases.select(layout, SECOND.release_id).present:
                    install(layout, SECOND)
            except OpsError as error:
                problems.append(error)

        threads = [threading.Thread(target=deploy) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert problems == []
        assert [path.name for path in layout.releases.iterdir()] == [SECOND.release_id]
        assert releases.damage(layout, SECOND.release_id) is None


SECOND_AGAIN = made({"trainer/__init__.py": b"A = 3\n", "trainer/blob": bytes(100_000)})


class TestLater:
    def test_an_edited_release_is_found_and_replaced(self, tmp_path: Path) -> None:
        layout = target(tmp_path)
        install(layout, FIRST)
        (layout.release(FIRST.release_id) / "trainer/a/b.py").write_text("B = 3\n")
        with pytest.raises(UploadCorrupt, match="not what was deployed"):
            releases.require_whole(layout)
        assert not releases.select(layout, FIRST.release_id).present
        install(layout, FIRST)
        assert releases.require_whole(layout) == FIRST.release_id

    def test_rollback_goes_back_and_forth(self, tmp_path: Path) -> None:
        layout = target(tmp_path)
        with pytest.raises(UsageError, match="no previous"):
            releases.rollback(layout, "")
        install(layout, FIRST)
        install(layout, SECOND)
        assert releases.rollback(layout, "").current == FIRST.release_id
        assert releases.rollback(layout, "").current == SECOND.release_id
        assert releases.rollback(layout, FIRST.release_id).current == FIRST.release_id
        for wrong in ("../../etc", "0" * 16):
            with pytest.raises(UsageError):
                releases.rollback(layout, wrong)
        listed = releases.listing(layout)
        assert {info.release_id: (info.current, info.previous) for info in listed} == {
            FIRST.release_id: (True, False), SECOND.release_id: (False, True),
        }  # fmt: skip


class TestRetirement:
    """Shown able to fail: without `_of_living_runs` the run's release goes, with KEPT = 0 all nine others go."""

    @staticmethod
    def deploy(layout: Layout, number: int, *, days_ago: int) -> str:
        release = made({"trainer/__init__.py": f"A = {number}\n".encode()})
        install(layout, release)
        when = time.time() - days_ago * 86400.0
        os.utime(layout.release(release.release_id), (when, when))
        return release.release_id

    def test_what_may_be_asked_for_stays(self, tmp_path: Path) -> None:
        layout = target(tmp_path)
        ids = [self.deploy(layout, number, days_ago=0) for number in range(10)]
        assert len(releases.listing(layout)) == 10  # all were in use within the hour
        me = process.identify(os.getpid())
        assert me is not None
        directory = layout.run("20260101T000000Z-sdpa-0000")
        directory.mkdir(parents=True)
        record = RunRecord(
            run_id=directory.name, nonce="n", variant="sdpa", release=ids[1], created_at=1.0, argv=(), log="",
            launcher="nohup", session="", host="h", boot=process.boot(), launched_by=me, supervisor=me,
        )  # fmt: skip
        runs.write_run(directory, record)
        for age, release_id in enumerate(reversed(ids), start=1):
            when = time.time() - age * 86400.0
            os.utime(layout.release(release_id), (when, when))
        (layout.cache / ids[0] / "inductor").mkdir(parents=True)
        (layout.pycache / ids[0]).mkdir(parents=True)
        said: list[str] = []
        tenth = made({"trainer/__init__.py": b"A = 10\n"})
        data = tenth.tar()
        releases.install(layout, tenth.manifest, io.BytesIO(data), len(data), said.append)
        stay = {tenth.release_id, ids[9], ids[1], *ids[4:9]}
        assert {path.name for path in layout.releases.iterdir()} == stay
        assert [text for text in said if "removed" in text] == [
            f"removed the old release {ids[number]}" for number in (3, 2, 0)
        ]
        assert not (layout.cache / ids[0]).exists()
        assert not (layout.pycache / ids[0]).exists()

    def test_a_release_that_was_selected_again_counts_as_used(self, tmp_path: Path) -> None:
        layout = target(tmp_path)
        old = self.deploy(layout, 0, days_ago=90)
        for number in range(1, 9):
            self.deploy(layout, number, days_ago=30 - number)
        assert layout.release(old).exists() is False
        again = self.deploy(layout, 1, days_ago=25)
        for number in range(20, 23):
            self.deploy(layout, number, days_ago=0)
        releases.select(layout, again)
        for number in range(30, 33):
            self.deploy(layout, number, days_ago=0)
        assert layout.release(again).exists()

    def test_agents_of_living_processes_and_the_newest_stay(self, tmp_path: Path) -> None:
        """Shown able to fail: with argv compared by path, the agent that was called with ~/ went."""
        shipped = [tmp_path / f"{number:064x}.pyz" for number in range(10)]
        for age, path in enumerate(shipped, start=2):
            for one in (path, compiled.path_of(path), path.with_name(f"{path.name}.cut")):
                one.write_bytes(b"")
                when = time.time() - age * 86400.0
                os.utime(one, (when, when))
        words = [os.sys.executable, "-c", "import sys; sys.stdin.read()", f"~/agents/{shipped[9].name}"]
        with subprocess.Popen(words, stdin=subprocess.PIPE) as caller:
            wait_until(lambda: words[-1] in process.command_lines().get(caller.pid, []), "its command line")
            gone = retire.agents(tmp_path, running=compiled.path_of(shipped[8]))
            caller.communicate()
        stay = [*shipped[:5], shipped[8], shipped[9]]
        assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == {path.stem for path in stay}
        assert len(list(tmp_path.iterdir())) == 3 * len(stay)
        assert sorted(gone) == sorted(path.stem for path in shipped if path not in stay)

    def test_agents_of_the_last_hour_stay(self, tmp_path: Path) -> None:
        shipped = [tmp_path / f"{number:064x}.pyz" for number in range(10)]
        for path in shipped:
            path.write_bytes(b"")
        assert retire.agents(tmp_path, running=shipped[0]) == []
        assert len(list(tmp_path.iterdir())) == 10


class TestThroughTheAgent:
    def test_second_deploy_moves_nothing(self, lab: Lab) -> None:
        first = lab.fab("deploy")
        assert first.returncode == 0, first.stderr
        assert "bytes sent" in first.stdout
        before = sorted(path.stat().st_mtime_ns for path in lab.root.rglob("*"))
        second = lab.fab("deploy")
        assert second.returncode == 0
        assert "nothing sent" in second.stdout
        assert sorted(path.stat().st_mtime_ns for path in lab.root.rglob("*")) == before

    def test_a_syntax_error_exits_22_with_file_and_line(self, lab: Lab) -> None:
        lab.fab("deploy")
        current = linked_release(lab.layout.current)
        (lab.checkout / "trainer" / "broken.py").write_text("def f(:\n")
        done = lab.fab("deploy", "launch")
        assert done.returncode == 22
        assert "trainer/broken.py:1:" in done.stderr
        assert "Traceback" not in done.stderr
        assert linked_release(lab.layout.current) == current
        assert lab.status()["run"] is None  # the chain ended at deploy

    def test_a_client_killed_in_the_upload_leaves_current(self, lab: Lab) -> None:
        """The far side sees an end of file that looks like success; only size and hashes tell."""
        release = releasing.collect(lab.checkout)
        releasing.deploy(lab.remote, release, "test", lambda _: None, console.upload)
        payload = SECOND.tar()
        for share in (0.0, 0.3, 0.99):
            argv = lab.remote.argv("install", "00" * 16, 0)
            from dflash_ops.agent import records, wire

            request = wire.Request(
                "00" * 16,
                PATIENCE_S,
                str(lab.root),
                str(lab.root),
                records.dump(InstallRequest(SECOND.manifest, "t")),
                len(payload),
            )
            cut = payload[: int(len(payload) * share)]
            done = lab.remote.transport.call(argv, stdin=[request.encode(), cut], deadline=PATIENCE_S)
            assert b'"kind": "UploadCorrupt"' in done.stdout
            assert linked_release(lab.layout.current) == release.release_id
        audit = [json.loads(line) for line in lab.layout.audit.read_text().splitlines()]
        assert [entry["detail"] for entry in audit] == [release.release_id]
