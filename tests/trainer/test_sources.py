"""Sources and the stream: what is read, what is held out, and that a cursor brings back the exact place."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import DataConfig
from trainer.data.batch import PackedBatch
from trainer.data.documents import BadDocument, DataError, RawDocument, digest
from trainer.data.sources import TextFiles, heldout_numbers, open_source, stdlib_files
from trainer.data.stream import BatchStream


class Letters:
    """A tokenizer of one token a byte; MASK is 300, far from any of them."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


class Listed:
    """Documents from a list."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def name(self, number: int) -> str:
        return f"doc{number}"

    def read(self, number: int) -> RawDocument:
        return RawDocument(self.name(number), text=self.texts[number])

    def fingerprint(self) -> str:
        return digest(map(len, self.texts))


def stream_of(texts: Sequence[str], *, mask_token_id: int = 300, vocab_size: int = 256, **fields: Any) -> BatchStream:
    defaults = {"token_budget": 64, "block_slots": 8, "max_documents": 6, "max_document_tokens": 20}
    config = DataConfig(**(defaults | {"heldout_documents": 2} | fields))
    return BatchStream(
        config, Letters(), vocab_size=vocab_size, mask_token_id=mask_token_id, run_seed=4, source=Listed(texts)
    )


TEXTS = ["".join(f"{n:02d}{i:02d}" for i in range(1 + 7 * n % 13)) for n in range(30)]
"""Thirty documents of 4 to 52 letters in which every piece of 20 is unique."""


def tensors(batch: PackedBatch) -> list[torch.Tensor]:
    found = [value for name in batch.__dataclass_fields__ if isinstance(value := getattr(batch, name), torch.Tensor)]
    return [*found, *(tensor for pair in batch.again for tensor in pair)]


def same(a: PackedBatch, b: PackedBatch) -> bool:
    pairs = zip(tensors(a), tensors(b), strict=True)
    return all(torch.equal(one, other) for one, other in pairs) and (a.cursor, a.index) == (b.cursor, b.index)


@settings(max_examples=25)
@given(st.integers(0, 40), st.integers(1, 12))
def test_seek_goes_to_exactly_after_the_batch(at: int, ahead: int) -> None:
    """Failed when deferred documents were left out of the cursor."""
    original = stream_of(TEXTS)
    batch = None
    for _ in range(at + 1):
        batch = next(original)
    assert batch is not None
    resumed = stream_of(TEXTS)
    resumed.seek(batch.cursor)
    for _ in range(ahead):
        assert same(next(original), next(resumed))
    assert original.skipped == resumed.skipped


def test_every_training_document_comes_once_an_epoch_and_no_held_out_one_ever() -> None:
    """Failed when the epoch's permutation was drawn over all documents."""
    stream = stream_of(TEXTS)
    held = {bytes(d.input_ids.tolist()) for d in stream.heldout()}
    assert len(held) == 2
    pieces = {t.encode()[s : s + 20] for t in TEXTS for s in range(0, len(t), 20)}
    never = {piece for piece in pieces if any(piece[:2] == h[:2] for h in held)}
    seen: list[bytes] = []
    while len(seen) < 4 * len(pieces):
        batch = next(stream)
        bounds = batch.cu_seqlens_D1.tolist()[: batch.documents + 1]
        seen += [bytes(batch.input_ids_T[a:b].tolist()) for a, b in itertools.pairwise(bounds)]
    assert set(seen) == pieces - never
    first_epoch = seen[: len(pieces - never)]
    # First fit may carry a piece over the epoch's end, by a row's worth of pieces at most.
    assert len(set(first_epoch)) >= len(first_epoch) - 6


def test_order_changes_between_epochs_and_with_the_seed() -> None:
    orders = [[next(s).input_ids_T.tolist() for _ in range(5)] for s in (stream_of(TEXTS), stream_of(TEXTS, seed=1))]
    assert orders[0] != orders[1]
    again = stream_of(TEXTS)
    assert orders[0] == [next(again).input_ids_T.tolist() for _ in range(5)]


def test_long_documents_are_cut_and_rows_are_filled_from_later_pieces() -> None:
    stream = stream_of(["x" * 1000] * 8)
    for _ in range(10):
        batch = next(stream)
        lengths = batch.cu_seqlens_D1.diff()
        assert int(lengths.max()) <= 20
        assert batch.tokens >= 60


def test_a_document_without_two_tokens_is_skipped_and_counted() -> None:
    stream = stream_of(["a", "", "bcd", "e"], heldout_documents=1)
    for _ in range(3):
        assert next(stream).documents >= 1
    assert stream.skipped["no two consecutive supervised tokens"] >= 2


def test_a_source_with_nothing_to_train_on_says_so_instead_of_looping() -> None:
    with pytest.raises(DataError, match="no document with two consecutive supervised tokens"):
        next(stream_of(["a", "b", "c", "d"]))


def test_the_mask_token_in_the_data_is_counted_or_fatal() -> None:
    texts = ["abcabc", "defdef", "xyz" * 3, "ghighi"]
    stream = stream_of(texts, mask_token_id=ord("z"), heldout_documents=1)
    for _ in range(4):
        assert ord("z") not in next(stream).input_ids_T
    assert stream.skipped["contains the MASK token"] >= 1
    strict = stream_of(texts, mask_token_id=ord("z"), heldout_documents=0, strict=True)
    with pytest.raises(DataError, match="contains the MASK token"):
        next(strict)


def test_a_token_outside_the_targets_vocabulary_is_fatal() -> None:
    with pytest.raises(DataError, match="outside the target's vocabulary"):
        next(stream_of(["abc"] * 4, vocab_size=98))


def test_a_changed_source_refuses_the_cursor() -> None:
    cursor = next(stream_of(TEXTS)).cursor
    with pytest.raises(DataError, match="cannot go on exactly"):
        stream_of(TEXTS[:-1]).seek(cursor)


def test_held_out_documents_do_not_depend_on_the_order_or_number_of_others() -> None:
    """Failed with held-out documents drawn by position."""
    names = [f"doc{n}" for n in heldout_numbers(Listed(TEXTS), 4)]
    more = Listed([*TEXTS, "extra"])
    again = [f"doc{n}" for n in heldout_numbers(more, 5)]
    assert set(names) <= set(again) | {"doc30"} or len(set(names) - set(again)) <= 1
    assert len(heldout_numbers(Listed(TEXTS[:4]), 32)) == 1, "at most a quarter is held out"


def test_text_parts_cover_a_file_line_by_line(tmp_path: Path) -> None:
    """Failed when a part began in the middle of a line."""
    lines = [f"line {n} " + "x" * (n * 37 % 3000) + "\n" for n in range(200)]
    path = tmp_path / "big.txt"
    path.write_text("".join(lines))
    source = TextFiles([path], tmp_path)
    parts = [source.read(n) for n in range(len(source))]
    assert len(parts) == -(-path.stat().st_size // TextFiles.PART_BYTES)
    texts = [p.text or "" for p in parts]
    assert "".join(texts) == "".join(lines)
    assert all(text.startswith("line ") and text.endswith("\n") for text in texts if text)


def test_the_standard_library_without_its_tests() -> None:
    files = stdlib_files()
    assert len(files) > 300
    assert files == sorted(files)
    parts = {part for f in files for part in f.parts}
    assert not parts & {"test", "tests", "site-packages", "dist-packages"}


@pytest.mark.parametrize("missing", ["nowhere.txt", "empty"])
def test_a_missing_or_empty_source_says_so(tmp_path: Path, missing: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").touch()
    with pytest.raises(DataError, match=r"data\.source"):
        open_source(str(tmp_path / missing), "auto")


def test_bytes_that_are_no_utf8_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9\n")
    document = open_source(str(path), "auto").read(0)
    assert document.text == "caf\ufffd\n"


@pytest.mark.parametrize("content", [bytes(range(256)) * 40, "caf\xe9\n".encode("utf-16")], ids=["binary", "utf-16"])
def test_what_is_no_text_is_a_bad_document(tmp_path: Path, content: bytes) -> None:
    """Failed as text full of replacement characters, which was trained on."""
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(BadDocument, match=r"a\.txt#0: no text: it holds NUL bytes.*UTF-8"):
        open_source(str(tmp_path / "a.txt"), "auto").read(0)


def test_a_file_that_grew_or_was_replaced_refuses_the_cursor(tmp_path: Path) -> None:
    """Failed with the number of documents alone."""
    for n in range(8):
        (tmp_path / f"{n}.txt").write_text(f"text {n} " * 20)
    config = DataConfig(source=str(tmp_path), token_budget=64, block_slots=8, max_documents=6, max_document_tokens=20)

    def fresh() -> BatchStream:
        return BatchStream(config, Letters(), vocab_size=256, mask_token_id=300)

    cursor = next(fresh()).cursor
    fresh().seek(cursor)
    (tmp_path / "3.txt").write_text("text 3 " * 21)
    with pytest.raises(DataError, match="cannot go on exactly"):
        fresh().seek(cursor)


def test_a_relative_source_that_is_not_there_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run starts elsewhere than the shell that launched it. Shown able to fail: without `looked` in the message."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as refused:
        open_source("chats.jsonl", "auto")
    assert f"looked for at {tmp_path / 'chats.jsonl'}" in str(refused.value)
    assert "absolute path" in str(refused.value)
