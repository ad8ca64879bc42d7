"""`fab tensorboard`: the real TensorBoard, through the agent, on a port of this machine."""

from __future__ import annotations

import json
import re
import signal
import urllib.error
import urllib.request

import pytest

from dflash_ops.agent import process
from dflash_ops.board import parse, request_bytes
from tests.ops.conftest import Lab
from tests.waiting import PATIENCE_S, wait_until

pytest.importorskip("tensorboard")


def boards(lab: Lab) -> list[int]:
    lines = process.command_lines().items()
    return [pid for pid, words in lines if "tensorboard.main" in words and str(lab.root) in " ".join(words)]


def test_through_the_route(lab: Lab) -> None:
    lab.deploy()
    lab.start("standin.steps=1")
    lab.wait_for("finished")
    shown = lab.start_fab("tensorboard", "--port", "0")
    assert shown.stdout is not None
    line = shown.stdout.readline().decode()
    match = re.search(r"http://127\.0\.0\.1:\d+/", line)
    assert match is not None, line
    with urllib.request.urlopen(match[0] + "data/logdir", timeout=PATIENCE_S) as answer:
        assert json.load(answer) == {"logdir": str(lab.layout.runs)}
    with pytest.raises(urllib.error.HTTPError) as missing:
        urllib.request.urlopen(match[0] + "nonsense", timeout=PATIENCE_S)
    assert missing.value.code == 404
    assert len(boards(lab)) == 1
    shown.send_signal(signal.SIGINT)
    shown.communicate(timeout=PATIENCE_S)
    assert shown.returncode == 0
    wait_until(lambda: not boards(lab), "TensorBoard has ended")


def test_a_port_in_use_is_said(lab: Lab) -> None:
    assert lab.fab("tensorboard", "--port", "99999").returncode == 2


def test_requests_are_made_anew() -> None:
    raw = request_bytes("GET", "/data?x=1", {"Host": "evil", "Cookie": "a", "Connection": "keep-alive"}, b"", 7)
    assert raw.startswith(b"GET /data?x=1 HTTP/1.1\r\n")
    assert b"Host: 127.0.0.1:7\r\n" in raw
    assert b"evil" not in raw
    for path in ("http://evil/", "/a b", "/a\r\nX: y"):
        with pytest.raises(ValueError, match="not carried"):
            request_bytes("GET", path, {}, b"", 7)


def test_answers_are_read_whole() -> None:
    answer = parse(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
    assert (answer.status, answer.read()) == (200, b"abc")
