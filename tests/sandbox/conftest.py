"""The sandbox as fixtures. Without root on Debian the tests are skipped; with CI=true that is a failure."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox import box as sandbox
from tests.sandbox.laptop import Laptop


@pytest.fixture(scope="session")
def shared_box() -> Iterator[sandbox.Box]:
    """One host for the whole run; tests that break it mend it."""
    reason = sandbox.missing()
    if reason:
        if os.environ.get("CI") == "true":
            pytest.fail(f"the sandbox must run in CI, but: {reason}")
        pytest.skip(f"sandbox: {reason}")
    with sandbox.box() as made:
        yield made


@pytest.fixture
def box(shared_box: sandbox.Box) -> Iterator[sandbox.Box]:
    """The host, whole again after each test."""
    yield shared_box
    shared_box.settings()
    if shared_box.sshd.process is None:
        shared_box.sshd.start()
    if not shared_box.container.running():
        shared_box.container.start()


@pytest.fixture
def laptop(box: sandbox.Box, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Laptop]:
    """An operator with the stand-in trainer in the checkout."""
    name = f"t{zlib.crc32(request.node.nodeid.encode()):08x}"  # short: a tmux socket's path must fit into 100 bytes
    made = Laptop(tmp_path, box, name)
    made.standin_trainer()
    yield made
    made.end_everything()
