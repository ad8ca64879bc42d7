"""`fab pull` and `fab report` against a real run directory: hashes, cuts, hostile names.

Shown able to fail: without the comparison of hashes in `_bring`, `test_a_damaged_part_is_fetched_again` keeps the
damage; without O_NOFOLLOW in the agent, `test_links_are_left_out` hands out /etc/passwd.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.agent import fetch
from dflash_ops.agent.fetch import FetchRequest, ListedFile, ListRequest
from dflash_ops.errors import HostUnreachable, UploadCorrupt, UsageError
from dflash_ops.pull import _place, _refuse_clashes, pull, read_whole
from dflash_ops.remote import Place, Remote
from dflash_ops.transport.local import LocalTransport
from tests.ops.conftest import Lab


def quiet(text: str) -> None:
    """No remarks."""


@pytest.fixture
def run(lab: Lab) -> Path:
    """A finished run with two checkpoints, one of 3 MB."""
    lab.deploy()
    lab.start("standin.steps=3")
    lab.wait_for("finished")
    directory = Path(lab.newest().directory)
    old = directory / "checkpoints" / "step-00000001"
    old.mkdir()
    (old / "drafter.safetensors").write_bytes(os.urandom(3_000_000))
    return directory


def content(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file() and path.name != "pull.json"
    }


def test_everything_comes_over_once(lab: Lab, run: Path, tmp_path: Path) -> None:
    done = lab.fab("pull", "--to", str(tmp_path))
    assert done.returncode == 0, done.stderr
    here = tmp_path / run.name
    assert content(here) == content(run)
    assert here.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in here.rglob("*") if path.is_file())
    manifest = json.loads((here / "pull.json").read_text())
    assert {entry["path"]: entry["sha256"] for entry in manifest["files"]} == content(run)
    again = lab.fab("pull", "--to", str(tmp_path))
    assert "0 bytes moved" in again.stdout


def test_what_was_cut_goes_on_at_its_end(lab: Lab, run: Path, tmp_path: Path) -> None:
    whole = (run / "checkpoints/step-00000001/drafter.safetensors").read_bytes()
    folder = tmp_path / run.name / "checkpoints/step-00000001"
    folder.mkdir(parents=True)
    (folder / ".drafter.safetensors.part").write_bytes(whole[:2_900_000])
    done = pull(lab.remote, "", tmp_path, "all", quiet)
    assert (folder / "drafter.safetensors").read_bytes() == whole
    assert done.moved < 200_000


def test_a_damaged_part_is_fetched_again(lab: Lab, run: Path, tmp_path: Path) -> None:
    whole = (run / "checkpoints/step-00000001/drafter.safetensors").read_bytes()
    folder = tmp_path / run.name / "checkpoints/step-00000001"
    folder.mkdir(parents=True)
    (folder / ".drafter.safetensors.part").write_bytes(b"x" * 2_900_000)
    pull(lab.remote, "", tmp_path, "all", quiet)
    assert (folder / "drafter.safetensors").read_bytes() == whole
    (folder / "drafter.safetensors").write_bytes(b"y" * len(whole))
    pull(lab.remote, "", tmp_path, "all", quiet)
    assert (folder / "drafter.safetensors").read_bytes() == whole


class CutTransport(LocalTransport):
    """Every stream breaks after a while, as a bad link would; `cuts` counts."""

    cuts = 0

    @contextmanager
    def stream(self, argv: Any, *, stdin: bytes = b"") -> Iterator[Any]:
        with super().stream(argv, stdin=stdin) as inner:
            yield self._Cut(self, inner)

    class _Cut:
        def __init__(self, owner: CutTransport, inner: Any) -> None:
            self._owner, self._inner, self._left = owner, inner, 24

        def read(self, timeout: float) -> bytes | None:
            self._left -= 1
            if self._left < 0:
                self._owner.cuts += 1
                raise HostUnreachable("the link broke")
            piece: bytes | None = self._inner.read(timeout)
            return piece


def test_a_link_that_breaks_again_and_again(lab: Lab, run: Path, tmp_path: Path) -> None:
    transport = CutTransport()
    remote = Remote(transport, Place(sys.executable, str(lab.root), str(lab.root)))
    pull(remote, "", tmp_path, "all", quiet)
    assert transport.cuts >= 2
    assert content(tmp_path / run.name) == content(run)


def test_which_checkpoints(lab: Lab, run: Path, tmp_path: Path) -> None:
    assert lab.fab("pull", "--to", str(tmp_path / "a"), "--checkpoints", "newest").returncode == 0
    names = {path.name for path in (tmp_path / "a" / run.name / "checkpoints").iterdir()}
    assert names == {"step-00000003"}
    assert lab.fab("pull", "--to", str(tmp_path / "b"), "--checkpoints", "none").returncode == 0
    assert not (tmp_path / "b" / run.name / "checkpoints").exists()
    assert lab.fab("pull", "--checkpoints", "some").returncode == 2


def test_links_are_left_out(lab: Lab, run: Path) -> None:
    (run / "link").symlink_to("/etc/passwd")
    (run / "folder").symlink_to("/etc")
    os.mkfifo(run / "pipe")
    (run / "half.partial").write_text("x")
    said: list[str] = []
    paths = {file.path for file in fetch.listing(lab.layout, ListRequest(), said.append).files}
    assert not {path for path in paths if path.startswith(("link", "folder", "pipe", "half"))}
    assert len(said) == 3
    for path in ("link", "folder/passwd", "pipe", "../run.json", "/etc/passwd", "", "checkpoints"):
        with pytest.raises(UsageError):
            fetch.fetch(lab.layout, FetchRequest(run.name, path, 0, 10), lambda event: True)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../b", "", "a//b", ".ssh/config", "a\nb", "-rf", "a\x00b", "."]
)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UploadCorrupt):
        _place(tmp_path, name)


def test_a_link_on_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "checkpoints").symlink_to(tmp_path / "out")
    with pytest.raises(UsageError):
        _place(tmp_path / "in", "checkpoints/x")


def test_two_names_that_fold_into_one_are_refused() -> None:
    with pytest.raises(UploadCorrupt):
        _refuse_clashes((ListedFile("a/X", 1, "0"), ListedFile("a/x", 1, "1")))


def test_a_growing_file_is_taken_as_it_was_listed(lab: Lab, tmp_path: Path) -> None:
    lab.deploy()
    lab.launch("standin.steps=1000000")
    done = lab.fab("pull", "--to", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert lab.newest().state == "training"
    assert (tmp_path / lab.newest().run_id / "train.log").stat().st_size > 0


def test_report_of_a_real_run(lab: Lab, run: Path, tmp_path: Path) -> None:
    with (run / "gpu.jsonl").open("w") as file:
        for n in range(3):
            card = {"index": 0, "utilization": 90.0 + n, "memory_mib": 1000.0, "power_w": 600.0, "temperature_c": None}
            file.write(json.dumps({"event": "gpu", "time": 1e9 + n, "cards": [card]}) + "\n")
    out = tmp_path / "page.html"
    done = lab.fab("report", run.name, "--out", str(out))
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    assert run.name in text
    assert "GPU utilization" in text
    assert "GPU temperature" not in text
    assert lab.fab("report", "newest", "--out", str(out)).returncode == 0
    assert lab.fab("report", "20200101T000000Z-x-0000").returncode == 2
    assert lab.fab("report", "newest", "--out", str(tmp_path / "missing" / "x")).returncode == 2


def test_a_file_that_is_not_there_reads_as_empty(lab: Lab, run: Path) -> None:
    assert read_whole(lab.remote, run.name, "gpu.jsonl", 100) == b""
