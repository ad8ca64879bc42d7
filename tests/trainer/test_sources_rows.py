"""Conversations and tables: loss masks on the assistant's tokens, and rows that cannot be used."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from trainer.config import DataConfig
from trainer.data.documents import BadDocument, DataError
from trainer.data.encode import encode
from trainer.data.rows import JsonLines, Table, row_document
from trainer.data.sources import open_source
from trainer.data.stream import BatchStream
from trainer.model.target_models import TINY

TALK = [
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "3 4"},
]
UNMARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWRITING = (
    "{% for m in messages %}{{ m['role'] if loop.last else 'was' }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY, local_files_only=True)


def supervised(tokenizer: Any, row: dict[str, Any]) -> str:
    ids, mask = encode(row_document("here:1", row), tokenizer)
    assert ids.shape == mask.shape
    return str(tokenizer.decode(ids[mask]))


def test_only_what_the_assistant_wrote_is_supervised(tokenizer: Any) -> None:
    """By the template's own marks. Failed when the mask was all true."""
    assert supervised(tokenizer, {"messages": TALK}) == "2<|im_end|>3 4<|im_end|>"


def test_a_template_without_marks_gives_the_same_turns(tokenizer: Any) -> None:
    """Failed when the generation prompt was counted as the assistant's."""
    tokenizer.chat_template = UNMARKED
    assert supervised(tokenizer, {"messages": TALK}) == "2<|im_end|>\n3 4<|im_end|>\n"
    whole = encode(row_document("here:1", {"messages": TALK}), tokenizer)[0]
    assert tokenizer.decode(whole) == tokenizer.apply_chat_template(TALK, tokenize=False)


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = REWRITING
    with pytest.raises(BadDocument, match="rewrites earlier turns"):
        supervised(tokenizer, {"messages": TALK})


def test_other_spellings_of_a_conversation(tokenizer: Any) -> None:
    shared = [{"from": "human", "value": "two?"}, {"from": "gpt", "value": "2"}]
    assert supervised(tokenizer, {"conversations": shared}) == "2<|im_end|>"


def test_text_and_tokens(tokenizer: Any) -> None:
    assert supervised(tokenizer, {"text": "all of it"}) == "all of it"
    ids, mask = encode(row_document("here:1", {"input_ids": [7, 8, 9], "loss_mask": [0, 1, 1]}), tokenizer)
    assert (ids.tolist(), mask.tolist()) == ([7, 8, 9], [False, True, True])
    assert encode(row_document("here:1", {"input_ids": [7, 8]}), tokenizer)[1].all()


BAD_ROWS = [
    ([1, 2], "no JSON object"),
    ({}, "neither messages nor text nor input_ids"),
    ({"text": 5}, "neither messages nor text nor input_ids"),
    ({"messages": []}, "no list of turns"),
    ({"messages": ["hello"]}, "a turn is no object"),
    ({"messages": [{"role": "user"}]}, "no role or no text"),
    ({"messages": [{"role": "user", "content": [{"image": "x"}]}]}, "no role or no text"),
    ({"input_ids": [1, "a"]}, "no list of token numbers"),
    ({"input_ids": [1, -1]}, "no list of token numbers"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "not as long as"),
    ({"input_ids": [1, 2**70]}, "no list of token numbers"),
    ({"input_ids": [1, 2], "loss_mask": ["0", "1"]}, "something else than 0 and 1"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_a_bad_row_says_where_and_why(row: Any, reason: str) -> None:
    with pytest.raises(BadDocument, match=f"talk.jsonl:3: .*{reason}"):
        row_document("talk.jsonl:3", row)


def jsonl(path: Path, good: int, *bad: str) -> Path:
    rows = [json.dumps({"messages": [*TALK, {"role": "user", "content": str(n)}]}) for n in range(good)]
    path.write_text("\n".join([*rows[:2], *bad, "", *rows[2:]]) + "\n")
    return path


def stream_of(
    path: Path, tokenizer: Any, tell: Callable[[str], None] = lambda complaint: None, **fields: Any
) -> BatchStream:
    settings = {"token_budget": 256, "block_slots": 8, "max_documents": 4, "max_document_tokens": 128}
    config = DataConfig(source=str(path), **(settings | {"heldout_documents": 0} | fields))
    return BatchStream(config, tokenizer, vocab_size=264, mask_token_id=1, tell=tell)


def test_bad_lines_are_counted_with_file_and_line_and_the_rest_trains(tmp_path: Path, tokenizer: Any) -> None:
    """Failed when blank lines were not counted in line numbers."""
    path = jsonl(tmp_path / "talk.jsonl", 6, "{not json", '{"messages": 3}')
    told: list[str] = []
    stream = stream_of(path, tokenizer, tell=told.append)
    for _ in range(20):
        assert next(stream).documents > 0
    assert stream.complaints == told, "each once, however many epochs"
    assert stream.skipped["no JSON object"] >= 2
    assert stream.skipped["messages is no list of turns"] >= 1
    assert {"talk.jsonl:3: no JSON object", "talk.jsonl:4: messages is no list of turns"} <= set(stream.complaints)
    assert JsonLines([path], tmp_path).name(4) == "talk.jsonl:6", "the blank line counts"


HALF = "\\ud800"  # as JSON writes it; Python reads it, and no tokenizer takes it


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[" * 100_000, "no JSON object"),
        ("1" * 5000, "no JSON object"),
        (f'{{"text": "abc {HALF} def"}}', "half a surrogate pair"),
        (f'{{"messages": [{{"role": "assistant", "content": "abc {HALF}"}}]}}', "half a surrogate pair"),
        ('{"text": "\\u0000\\u0000\\u0000"}', None),
    ],
)
def test_hostile_lines_are_counted(line: str, reason: str | None, tmp_path: Path, tokenizer: Any) -> None:
    """Brackets without end and halves of characters once ended the run with a traceback."""
    stream = stream_of(jsonl(tmp_path / "talk.jsonl", 4, line), tokenizer)
    for _ in range(6):
        assert next(stream).documents > 0
    if reason is None:
        assert not stream.complaints
    else:
        assert stream.complaints[0].startswith("talk.jsonl:3: ")
        assert reason in stream.complaints[0]


def test_a_longer_last_line_refuses_the_cursor(tmp_path: Path, tokenizer: Any) -> None:
    """Failed while only the lines' beginnings counted."""
    path = jsonl(tmp_path / "talk.jsonl", 4)
    cursor = next(stream_of(path, tokenizer)).cursor
    path.write_bytes(path.read_bytes().rstrip() + b"    \n")
    with pytest.raises(DataError, match="cannot go on exactly"):
        stream_of(path, tokenizer).seek(cursor)


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    """In a process of another user: root may read everything."""
    path = jsonl(tmp_path / "talk.jsonl", 2)
    path.chmod(0)
    if os.access(path, os.R_OK):
        # A directory in the file's place is refused to root too.
        path.unlink()
        path.mkdir()
    with pytest.raises(DataError, match=r"talk\.jsonl cannot be read"):
        JsonLines([path], tmp_path)


def test_a_table_damaged_inside_is_named(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library wraps it in an error of its own, which once came out as a traceback."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "part.parquet"
    datasets.Dataset.from_list([{"input_ids": [1, 2, 3]}] * 3).to_parquet(str(path))
    data = bytearray(path.read_bytes())
    data[6:60] = bytes(54)
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"part\.parquet cannot be read as parquet"):
        stream_of(path, tokenizer)


def test_strict_ends_the_run_at_the_first_bad_line(tmp_path: Path, tokenizer: Any) -> None:
    path = jsonl(tmp_path / "talk.jsonl", 3, "{not json")
    stream = stream_of(path, tokenizer, strict=True)
    with pytest.raises(DataError, match=r"talk\.jsonl:3: no JSON object"):
        next(stream)


def test_a_conversation_without_an_answer_is_left_out(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "talk.jsonl"
    silent = json.dumps({"messages": [{"role": "user", "content": "anyone?"}]})
    path.write_text("\n".join([silent, json.dumps({"messages": TALK})]))
    stream = stream_of(path, tokenizer, strict=True)
    for _ in range(3):
        batch = next(stream)
        assert batch.keep_N.any()
    assert stream.skipped["no two consecutive supervised tokens"] >= 1


def test_anchors_lie_on_answers_only(tmp_path: Path, tokenizer: Any) -> None:
    batch = next(stream_of(jsonl(tmp_path / "talk.jsonl", 4), tokenizer))
    chosen = batch.anchors_N[batch.keep_N].long()
    assert batch.loss_mask_T[chosen].all()
    assert batch.loss_mask_T[chosen + 1].all()
    assert not batch.loss_mask_T.all()


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_tables_through_datasets(form: str, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"input_ids": [10 + n, 11, 12, 13], "loss_mask": [0, 1, 1, 1]} for n in range(8)]
    data = tmp_path / "data"
    data.mkdir()
    table = pa.Table.from_pylist(rows)
    for part in range(2):
        piece = table.slice(part * 4, 4)
        if form == "parquet":
            pyarrow.parquet.write_table(piece, data / f"{part}.parquet")
        else:
            with pa.OSFile(str(data / f"{part}.arrow"), "wb") as sink, pa.ipc.new_stream(sink, piece.schema) as writer:
                writer.write_table(piece)
    source = open_source(str(data), "auto")
    assert isinstance(source, Table)
    assert len(source) == 8
    assert source.name(5) == f"1.{form}:1"
    assert [source.read(n).input_ids for n in range(8)] == [row["input_ids"] for row in rows]
    batch = next(stream_of(data, tokenizer))
    assert batch.documents == 4
    assert batch.loss_mask_T[:4].tolist() == [False, True, True, True]


def test_tokens_of_another_vocabulary_are_fatal(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"input_ids": [5, 6, 99999]}))
    stream = stream_of(path, tokenizer)
    with pytest.raises(DataError, match="tokenised for another model"):
        next(stream)


def test_the_kind_of_a_directory_is_told_by_its_files_or_asked_for(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", 3)
    assert isinstance(open_source(str(tmp_path), "auto"), JsonLines)
    (tmp_path / "b.txt").write_text("text\n")
    with pytest.raises(DataError, match=r"set data\.format"):
        open_source(str(tmp_path), "auto")
    assert len(open_source(str(tmp_path), "text")) == 1
    with pytest.raises(DataError, match="no parquet files"):
        open_source(str(tmp_path), "parquet")
    (tmp_path / "c.arrow").write_bytes(b"no table")
    with pytest.raises(DataError, match="cannot be read as arrow"):
        open_source(str(tmp_path / "c.arrow"), "auto")


def test_a_cursor_over_conversations_is_exact(tmp_path: Path, tokenizer: Any) -> None:
    path = jsonl(tmp_path / "talk.jsonl", 30, "{bad")
    stream = stream_of(path, tokenizer)
    cursor = [next(stream) for _ in range(5)][-1].cursor
    again = stream_of(path, tokenizer)
    again.seek(json.loads(json.dumps(cursor)))
    for _ in range(5):
        one, two = next(stream), next(again)
        assert torch.equal(one.input_ids_T, two.input_ids_T)
        assert one.cursor == two.cursor
