"""A file that the operator names and that is none: said at once, with what, why and fix. Nothing waits for it.

Shown able to fail: without `require_regular` each FIFO here was waited on until the test's limit.
"""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from dflash_ops import trust
from dflash_ops.errors import HostsFileError, UsageError
from dflash_ops.hosts import HOSTS_FILE_VARIABLE, load
from dflash_ops.named_file import require_regular
from dflash_ops.settings import Ssh
from dflash_ops.transport.link import connection, verify_keys
from tests.ops.conftest import Lab


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def refused(done: subprocess.CompletedProcess[str], path: Path) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"error: {path}: is a FIFO, not a file" in done.stderr
    assert "why: " in done.stderr
    assert "next: name a regular file" in done.stderr
    assert "Traceback" not in done.stderr


def test_hosts_file(lab: Lab, fifo: Path) -> None:
    lab.extra[HOSTS_FILE_VARIABLE] = str(fifo)
    refused(lab.fab("status"), fifo)


@pytest.mark.parametrize(
    "words",
    [("diagnose", "--evidence"), ("diagnose", "--save"), ("report", "newest", "--out"), ("provision", "--lock")],
)
def test_flags_that_name_a_file(lab: Lab, fifo: Path, words: tuple[str, ...]) -> None:
    lab.deploy()
    lab.start()
    lab.wait_for("finished")
    refused(lab.fab(*words, str(fifo)), fifo)


@pytest.mark.parametrize("key", ["known_hosts", "config"])
def test_files_that_hosts_yaml_names(lab: Lab, fifo: Path, key: str) -> None:
    lab.hosts_file.write_text(
        f"default: far\ntargets:\n  far:\n    via: ssh\n    ssh: {{host: 127.0.0.1, port: 1, {key}: {fifo}}}\n"
    )
    refused(lab.fab("status"), fifo)
    refused(lab.fab("trust"), fifo)


def test_every_kind(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path, kind in (
            (tmp_path, "a directory"),
            (Path("/dev/zero"), "a device"),
            (tmp_path / "socket", "a socket"),
        ):
            with pytest.raises(UsageError, match=kind):
                require_regular(path)
    link = tmp_path / "link"
    link.symlink_to("/dev/zero")
    with pytest.raises(HostsFileError, match="a device"):
        load(link)
    with pytest.raises(UsageError, match="a device"):
        trust.known(Ssh(host="pve", known_hosts="/dev/zero"), "pve")
    with pytest.raises(UsageError, match="a device"):
        verify_keys(connection(Ssh(host="pve")), Path("/dev/zero"))


def test_a_file_and_one_that_is_not_there_are_left_to_their_reader(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "none", Path("x" * 5000), Path("a\0b")):
        assert require_regular(path) == path
