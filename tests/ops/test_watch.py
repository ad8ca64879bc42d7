"""`fab watch`: the picture fits 80 by 24, the stream survives, the hook is called at each change.

Shown able to fail: without the truncation in `draw` a long sentence pushes the picture out of 24 lines.
"""

from __future__ import annotations

import io
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from dflash_ops.agent import process, runs, snapshot
from dflash_ops.agent.gpu_log import Reading, parse
from dflash_ops.agent.runs import RunStatus
from dflash_ops.agent.snapshot import Numbers, Snapshot, WatchRequest
from dflash_ops.dashboard import History, draw
from dflash_ops.errors import DeadlineExceeded
from dflash_ops.events import parse_events
from dflash_ops.watch import Notifier, View, views
from tests.ops.conftest import Lab
from tests.waiting import PATIENCE_S, wait_until

RECORDINGS = Path(__file__).parents[1] / "fixtures" / "nvidia-smi"


def status(state: str = "training", detail: str = "step 4000, 3 s ago") -> RunStatus:
    return RunStatus(
        "20261129T021402Z-threadwarm-9c1e", state, detail, "threadwarm", "r", 0.0, "/d", "/d/log", "tmux", "s"
    )


def card(index: int) -> Reading:
    return Reading(index, f"GPU-{index}", 141_000.0, 143_771.0, 98.0, 689.0, 71.0)


def busy_view(cards: int = 8) -> View:
    numbers = Numbers(
        step=4000,
        max_steps=10_000,
        loss=1.8803,
        accept_len=5.24,
        heldout_accept_len=4.86,
        context_tokens_per_s=21_480.0,
        usual_tokens_per_s=21_473.0,
        step_interval_s=66.0,
        memory_gb=76.7,
        grad_norm=0.45,
        queues={"batches": 2.0, "hidden-0": 1.0, "hidden-1": 2.0},
        utilization={f"{role}-{n}": 0.97 for role in ("target", "drafter", "verifier") for n in range(4)},
        balance="targets are the slowest stage; 3 targets + 1 drafter on these 4 GPUs would give 3.00 x (a batch takes",
        gate_open=True,
        checkpoint_step=4000,
        checkpoint_time=880.0,
        last_event=997.0,
    )
    shot = Snapshot(1000.0, status(), numbers, tuple(map(card, range(cards))), 812 << 30, 120 << 30, 256 << 30)
    return View("ct200", shot)


def drawn(view: View, width: int = 80) -> list[str]:
    out = io.StringIO()
    history = History()
    for step in range(60):
        numbers = Numbers(step=step, loss=9.0 - step / 10, context_tokens_per_s=21_000.0 + step)
        history.add(View("ct200", Snapshot(0.0, status(), numbers, (), None, None, None)))
    Console(file=out, width=width, height=24, force_terminal=False).print(draw(view, history, width=width))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("cards", [0, 1, 8, 16])
def test_80_by_24_holds_all_of_it(cards: int) -> None:
    lines = drawn(busy_view(cards))
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for shown in ("training", "4,000", "40% of 10,000", "1.8803", "5.24", "4.86", "21,480", "100% of its median"):
        assert shown in text
    assert "batches 2" in text
    assert "target-0 97%" in text
    assert "balance  targets are the slowest stage; 3 targets + 1 drafter" in text
    assert "120 s ago" in text or "2 min ago" in text
    assert "812 GiB free" in text
    assert ("98 %" in text and "689 W" in text and "71 °C" in text) == (cards > 0)


def test_a_long_sentence_does_not_push_the_picture_out() -> None:
    view = busy_view()
    assert view.snapshot is not None
    long = replace(view.snapshot, run=status(detail="a very long reason " * 200))
    lines = drawn(View("ct200", long))
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


def test_the_gate_is_shown_while_it_is_closed() -> None:
    shot = Snapshot(9.0, status("warming", "1 warm-up"), Numbers(warmed=("drafter-0",)), (), None, None, None)
    assert any("gate" in line and "drafter-0" in line for line in drawn(View("ct200", shot)))


def test_a_lost_connection_is_said_and_the_last_numbers_stay() -> None:
    view = busy_view()
    lost = View("ct200", view.snapshot, DeadlineExceeded("nothing came for 15 s"), 42.0)
    text = "\n".join(drawn(lost))
    assert "unreachable" in text
    assert "no connection for 42 s" in text
    assert "1.8803" in text


def test_remote_text_cannot_reach_the_terminal_raw() -> None:
    shot = Snapshot(0.0, status(detail="\x1b]0;owned\x07\x1b[2Jx"), Numbers(), (), None, None, None)
    assert "\x1b" not in "".join(drawn(View("ct200", shot)))


def test_numbers_from_a_recorded_run() -> None:
    text = "\n".join(
        json.dumps({"event": "step", "time": 10.0 * n, "step": n, "loss": 2.0, "context_tokens_per_s": 100.0 + n})
        for n in range(1, 6)
    )
    found = snapshot.numbers(parse_events(text + '\n{"event":"checkpoint","time":51,"step":5,"path":"x"}'))
    assert (found.step, found.usual_tokens_per_s, found.step_interval_s) == (5, 103.0, 10.0)
    assert (found.checkpoint_step, found.gate_open) == (5, True)


ODD = st.recursive(
    st.sampled_from([None, True, 0, -1, 10**400, 1.5, "nan", "inf", "-inf", "x", ""]) | st.integers(-(2**70), 2**70),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "target0"]), inner, max_size=3),
    max_leaves=5,
)
KEYS = ["step", "max_steps", "loss", "accept_len", "context_tokens_per_s", "queues", "utilization", "text", "thread"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["step", "eval", "checkpoint", "balance", "warmup", "gate_open"]),
            st.dictionaries(st.sampled_from([*KEYS, "memory_gb", "grad_norm", "step_time"]), ODD),
        ),
        max_size=5,
    )
)
@example([("step", {"step": 1, "max_steps": "inf"})])
@settings(max_examples=60, deadline=None)
def test_whatever_a_release_wrote_in_its_events_is_shown_or_left_out(lines: list[tuple[str, dict[str, Any]]]) -> None:
    """Of another release, or damaged. Seen to fail: `max_steps` as infinity ended `fab watch` as a bug of its own."""
    text = "\n".join(json.dumps(values | {"event": kind, "time": 1.0 + n}) for n, (kind, values) in enumerate(lines))
    shot = Snapshot(9.0, status(), snapshot.numbers(parse_events(text)), (), None, None, None)
    History().add(View("ct200", shot))
    assert len(drawn(View("ct200", shot))) <= 24


def test_cards_from_recordings() -> None:
    (one,) = parse((RECORDINGS / "h200_gpus_idle.csv").read_text())
    assert (one.index, one.power_w, one.temperature_c, one.utilization) == (0, 84.55, 36.0, 0.0)
    text = "index, uuid, memory.used [MiB], temperature.gpu\n0, GPU-1, [N/A], [Not Supported]\ngarbage\n"
    (odd,) = parse(text)
    assert (odd.memory_mib, odd.temperature_c) == (None, None)


def test_a_stream_of_json_until_the_end(lab: Lab) -> None:
    lab.deploy()
    lab.start("standin.steps=40")
    done = lab.fab("watch", "--json", "--until-end", "--interval", "1")
    bodies = [json.loads(line) for line in done.stdout.splitlines()]
    assert bodies[-1]["state"] == "finished"
    assert bodies[-1]["snapshot"]["numbers"]["step"] == 40
    assert done.returncode == 0


def test_the_hook_is_called_at_each_change_with_its_diagnosis(lab: Lab, tmp_path: Path) -> None:
    lab.deploy()
    lab.launch("standin.steps=1000000")
    heard = tmp_path / "heard.jsonl"
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\ncat >> '{heard}'\n")
    hook.chmod(0o755)
    watcher = lab.start_fab("watch", "--json", "--until-end", "--interval", "1", "--notify", f"'{hook}' a")
    assert watcher.stdout is not None
    assert json.loads(watcher.stdout.readline())["state"] == "training"
    record = runs.read_run(Path(lab.newest().directory))
    assert record is not None
    assert record.supervisor is not None
    process.send(record.supervisor, signal.SIGKILL)
    watcher.communicate(timeout=PATIENCE_S)
    assert watcher.returncode == 31
    (body,) = [json.loads(line) for line in heard.read_text().splitlines()]
    assert (body["from"], body["to"], body["run"]) == ("training", "lost", record.run_id)
    assert body["diagnosis"]["incident"] == "run-lost"


def senders_of(lab: Lab) -> list[int]:
    """The agents that send snapshots from this lab's root."""
    lines = process.command_lines().items()
    return [pid for pid, words in lines if words[-1] == "watch" and str(lab.root) in " ".join(words)]


def test_a_stream_comes_back_after_a_drop(lab: Lab) -> None:
    """The agent that sends is killed, as a dropped link would end it; the next view says so, the one after is whole."""
    lab.deploy()
    lab.launch("standin.steps=1000000")
    stream = views(lab.remote, "local", WatchRequest(interval_s=0.2))
    assert next(stream).state == "training"
    senders = senders_of(lab)
    assert len(senders) == 1
    sender = process.identify(senders[0])
    assert sender is not None
    process.send(sender, signal.SIGKILL)
    seen = []
    wait_until(lambda: seen.append(next(stream)) or seen[-1].error, "the drop")  # type: ignore[func-returns-value]
    assert seen[-1].state == "unreachable"
    assert seen[-1].snapshot is not None
    wait_until(lambda: next(stream).state == "training", "the return")
    stream.close()
    wait_until(lambda: not senders_of(lab), "no sender is left behind")


def test_watching_ends_at_once_on_interrupt_and_leaves_the_run(lab: Lab) -> None:
    lab.deploy()
    lab.launch("standin.steps=1000000")
    watcher = lab.start_fab("watch", "--json")
    assert watcher.stdout is not None
    watcher.stdout.readline()
    watcher.send_signal(signal.SIGINT)
    watcher.communicate(timeout=PATIENCE_S)
    assert watcher.returncode == 130
    assert lab.newest().state == "training"


def notifier(command: str, remarks: list[str]) -> Notifier:
    return Notifier.of(command, remarks.append, lambda view: {})


def test_a_hook_that_fails_or_is_missing_is_remarked() -> None:
    remarks: list[str] = []
    training = busy_view()
    failed = View("ct200", Snapshot(0.0, status("failed"), Numbers(), (), None, None, None))
    for command in (f"{sys.executable} -c 'import sys; sys.exit(\"no\")'", "/nonexistent/hook"):
        hook = notifier(command, remarks)
        for view in (training, training, failed, failed):
            hook.see(view)
        hook.close()
    assert len(remarks) == 2
    assert "ended with 1" in remarks[0]
    assert "cannot run" in remarks[1]


def test_a_hook_s_words_are_not_run_by_a_shell(tmp_path: Path) -> None:
    remarks: list[str] = []
    hook = notifier(f"touch '{tmp_path}/$HOME;x'", remarks)
    hook.see(busy_view())
    hook.see(View("ct200"))
    hook.close()
    assert (tmp_path / "$HOME;x").exists(), "the words are operands of one program, taken as they are"
