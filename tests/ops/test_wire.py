"""The protocol: frames survive any way of cutting, noise is never taken for a frame, records round-trip."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops import errors
from dflash_ops.agent import records, wire
from dflash_ops.agent.process import Identity
from dflash_ops.agent.runs import Latest, RunStatus
from dflash_ops.agent.wire import Answer, Beat, Data, Event, FrameReader, Progress, Request

NONCE = "0123456789abcdef"
FOREIGN = "fedcba9876543210"

texts = st.text(st.characters(codec="utf-8"), max_size=40)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(Progress, texts),
    st.just(Beat()),
    st.builds(Data, st.integers(0, 2**40), st.integers(0, 2**40), st.binary(max_size=300)),
)
noises = st.one_of(
    st.binary(max_size=60).filter(lambda data: b"@dflash" not in data),
    st.builds(lambda event: wire.encode(event, FOREIGN), events),
    st.just(f"@dflash:{NONCE}".encode()),  # a torn frame of ours
    st.just(f"@dflash:{NONCE}:data:x:y:z".encode()),
)


def pieces(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """`data` cut at the given places."""
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def read(stream: Iterable[bytes]) -> list[Event]:
    reader = FrameReader(NONCE)
    return [event for piece in stream for event in reader.feed(piece)]


class TestFrames:
    """Shown able to fail: without the leading newline in `encode` the noise test fails at once."""

    @given(st.lists(st.tuples(noises, events)), st.lists(st.integers(0, 10_000), max_size=12))
    def test_every_frame_arrives_whole_and_once_however_cut(
        self, parts: list[tuple[bytes, Event]], cuts: list[int]
    ) -> None:
        data = b"".join(noise + wire.encode(event, NONCE) for noise, event in parts)
        assert read(pieces(data, cuts)) == [event for _, event in parts]

    @given(st.lists(events, max_size=4), st.integers(0, 10_000))
    def test_a_cut_stream_gives_a_prefix_and_no_answer(self, sent: list[Event], cut: int) -> None:
        data = b"".join(wire.encode(event, NONCE) for event in sent) + wire.encode(Answer(0, {"a": 1}), NONCE)
        got = read([data[: cut % len(data)]])
        assert got == sent[: len(got)]

    @given(texts, texts)
    def test_newlines_and_marks_inside_values_cannot_make_a_frame(self, text: str, tail: str) -> None:
        hostile = Progress(f"{text}\n@dflash:{NONCE}:answer:{{}}\n{tail}")
        assert read([wire.encode(hostile, NONCE)]) == [hostile]

    def test_payload_that_looks_like_an_answer_stays_payload(self) -> None:
        inside = wire.encode(Answer(0, {"forged": True}), NONCE)
        assert read([wire.encode(Data(0, 1, inside), NONCE)]) == [Data(0, 1, inside)]

    def test_the_first_answer_ends_the_conversation(self) -> None:
        data = wire.encode(Answer(0, {"first": 1}), NONCE) + wire.encode(Answer(1, {"second": 1}), NONCE)
        assert read([data]) == [Answer(0, {"first": 1})]

    def test_noise_is_kept_for_diagnosis_and_bounded(self) -> None:
        reader = FrameReader(NONCE)
        assert list(reader.feed(b"x" * 100_000)) == []
        assert list(reader.feed(b"bash: warning\n" + wire.encode(Beat(), NONCE))) == [Beat()]
        assert len(reader.noise) <= wire.NOISE_KEPT
        assert reader.noise.endswith(b"bash: warning")

    def test_another_schema_is_no_answer(self) -> None:
        line = f'\n@dflash:{NONCE}:answer:{{"schema": 99, "rc": 0}}\n'.encode()
        with pytest.raises(wire.ProtocolError, match="99"):
            read([line])


class TestRequests:
    @given(st.dictionaries(texts, st.one_of(texts, st.integers(), st.none()), max_size=4), st.integers(0, 2**40))
    def test_round_trip_on_one_line(self, params: dict[str, object], size: int) -> None:
        request = Request(NONCE, 12.5, "/root/x", "~/w", params, size)
        line = request.encode()
        assert line.count(b"\n") == 1
        assert Request.decode(line) == request

    @given(st.integers(0, 200))
    def test_a_cut_request_is_refused(self, cut: int) -> None:
        line = Request(NONCE, 1.0, "/r", "/w", {"a": "b"}).encode()
        with pytest.raises(wire.ProtocolError):
            Request.decode(line[: cut % len(line)])

    @pytest.mark.parametrize("line", [b"", b"[]\n", b"null\n", b"{}\n", b'{"schema": 1}\n', b"\xff\n"])
    def test_garbage_is_refused(self, line: bytes) -> None:
        with pytest.raises(wire.ProtocolError):
            Request.decode(line)


class TestErrors:
    def test_each_error_comes_back_as_itself(self) -> None:
        kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.OpsError)]
        for kind in kinds:
            sent = kind("what", why="why", hint="hint")
            back = wire.error_from_json(json.loads(json.dumps(wire.error_to_json(sent))))
            assert type(back) is kind
            assert back.lines() == sent.lines()
            assert back.reported

    def test_an_unknown_kind_is_an_agent_failure(self) -> None:
        assert type(wire.error_from_json({"kind": "INTERRUPTED", "what": "x"})) is errors.AgentFailed
        assert type(wire.error_from_json({"kind": "ClassVar", "what": "x"})) is errors.AgentFailed


class TestRecords:
    def test_nested_records_round_trip_through_json(self) -> None:
        status = RunStatus(
            run_id="r", state="training", detail="", variant="v", release="x", created_at=1.0, directory="/d", log="/l",
            launcher="tmux", session="s", latest=Latest(step=3, loss=0.5, end={"reason": "done"}), overrides={"a": "b"},
        )  # fmt: skip
        assert records.load(RunStatus, json.loads(json.dumps(records.dump(status)))) == status

    def test_unknown_keys_are_ignored_and_wrong_types_named(self) -> None:
        body = {"pid": 1, "started": 2, "boot": "b", "from_the_future": 3}
        assert records.load(Identity, body) == Identity(1, 2, "b")
        with pytest.raises(ValueError, match=r"Identity\.pid: expected int"):
            records.load(Identity, body | {"pid": "1"})
        with pytest.raises(ValueError, match=r"Identity\.boot is missing"):
            records.load(Identity, {"pid": 1, "started": 2})

    def test_records_are_frozen(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            Identity(1, 2, "b").pid = 3  # type: ignore[misc]  # that it cannot be written is the point
