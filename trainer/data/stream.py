"""The endless, deterministic, resumable stream of packed rows.

An epoch gives each of the source's documents once (`Corpus`). Each is tokenised, cut into pieces of at most
data.max_document_tokens and put into a pool, from which rows are filled by drawing; so the pieces of one
long document spread over many rows. The cursor names the pool's pieces, not their text: a few hundred
integers bring the stream back to the exact same place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from trainer.config import DataConfig
from trainer.data.batch import PackedBatch
from trainer.data.documents import BadDocument, DataError, DocumentSource
from trainer.data.encode import encode
from trainer.data.order import Corpus, Permuted, seed_for
from trainer.data.packing import Document, first_fit, pack
from trainer.data.sources import open_source

POOL_PIECES = 128
CANDIDATES = 16
"""Pieces drawn beyond a full row, from which a gap at its end is filled."""

COMPLAINTS = 20
NOTHING_TO_LEARN = "no two consecutive supervised tokens"

Ref = tuple[int, int]
"""A piece: document number, piece number."""


class BatchStream(Iterator[PackedBatch]):
    """`next` gives the next packed row; `seek(batch.cursor)` goes to just after that row."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        *,
        vocab_size: int,
        mask_token_id: int,
        run_seed: int = 0,
        source: DocumentSource | None = None,
        tell: Callable[[str], None] = lambda complaint: None,
    ) -> None:
        """`tell` hears of the first COMPLAINTS bad documents. Raises DataError when the source is missing or empty."""
        self._config = config
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._mask_token_id = mask_token_id
        self._run_seed = run_seed
        self._corpus = open_corpus(config, source)
        self._fingerprint = self._corpus.fingerprint()
        self.skipped: Counter[str] = Counter()
        """Documents that were left out, counted by reason; one that is read in two epochs counts twice."""
        self.complaints: list[str] = []
        """The first few bad ones, with file and line; one that is merely too short is not bad."""
        self._tell = tell
        self._index = 0
        self._epoch = 0
        self._draws = 0
        self._pool: list[tuple[Ref, Document]] = []
        self._deferred: list[tuple[Ref, Document]] = []

    def __next__(self) -> PackedBatch:
        config = self._config
        candidates = self._deferred
        while sum(len(d) for _, d in candidates) < config.token_budget and len(candidates) < config.max_documents:
            candidates.append(self._draw())
        while len(candidates) < config.max_documents and self._gap(candidates) and len(candidates) < CANDIDATES:
            candidates.append(self._draw())
        chosen = set(first_fit([len(d) for _, d in candidates], config.token_budget, config.max_documents))
        documents = [d for n, (_, d) in enumerate(candidates) if n in chosen]
        self._deferred = [c for n, c in enumerate(candidates) if n not in chosen]
        index = self._index
        self._index += 1
        return pack(
            documents,
            index=index,
            cursor=self._cursor(),
            token_budget=config.token_budget,
            block_slots=config.block_slots,
            max_documents=config.max_documents,
            run_seed=self._run_seed,
            reuse=config.reuse,
        )

    def _gap(self, candidates: list[tuple[Ref, Document]]) -> bool:
        """Whether first fit would leave room that a further piece might fill."""
        lengths = [len(d) for _, d in candidates]
        used = sum(lengths[n] for n in first_fit(lengths, self._config.token_budget, self._config.max_documents))
        return used < self._config.token_budget

    def _cursor(self) -> dict[str, Any]:
        return {
            "index": self._index,
            **self._corpus.place(),
            "draws": self._draws,
            "pool": [list(ref) for ref, _ in self._pool],
            "deferred": [list(ref) for ref, _ in self._deferred],
            "skipped": dict(self.skipped),
            "source": self._fingerprint,
        }

    def seek(self, cursor: dict[str, Any]) -> None:
        """Go to where a cursor was taken. Raises DataError when the source is not the one it was taken from."""
        if cursor["source"] != self._fingerprint:
            raise DataError(
                f"data.source {self._config.source!r} has other documents now than when the checkpoint was made: "
                "the run cannot go on exactly; restore the data, or start a new run (from these weights: export them "
                "and set drafter.init_from)"
            )
        self._index, self._epoch = cursor["index"], cursor["epoch"]
        self._draws = cursor["draws"]
        self._corpus.seek(cursor)
        self._corpus.fetch(number for number, _ in cursor["pool"] + cursor["deferred"])
        cache: dict[int, list[Document]] = {}

        def restore(ref: list[int]) -> tuple[Ref, Document]:
            number, piece = ref
            if number not in cache:
                cache[number] = self._pieces(number)
            if piece >= len(cache[number]):
                raise DataError(f"{self._corpus.name(number)} changed since the checkpoint was made")
            return (number, piece), cache[number][piece]

        self._pool = [restore(ref) for ref in cursor["pool"]]
        self._deferred = [restore(ref) for ref in cursor["deferred"]]
        self._corpus.fetch(())
        self.skipped = Counter(cursor["skipped"])  # last: reading the pieces again counted them again

    def heldout(self) -> list[Document]:
        """One piece of each held-out document; they never train.

        From its middle: documents of one kind begin alike (licence, imports), which says little about the rest.
        """
        self._corpus.fetch(self._corpus.heldout)
        pieces = [self._pieces(number) for number in sorted(self._corpus.heldout)]
        self._corpus.fetch(())
        return [found[len(found) // 2] for found in pieces if found]

    def _draw(self) -> tuple[Ref, Document]:
        empty_epochs = 0
        while len(self._pool) < POOL_PIECES:
            number = self._corpus.draw()
            if number is None:
                if not self._pool:
                    empty_epochs += 1
                    if empty_epochs == 2:
                        raise DataError(
                            f"data.source {self._config.source!r} has no document with two consecutive supervised "
                            f"tokens; skipped: {dict(self.skipped)}"
                        )
                elif self._epoch_small():
                    break
                self._epoch += 1
                self._corpus.begin(self._epoch)
                continue
            self._pool += [((number, n), piece) for n, piece in enumerate(self._pieces(number))]
        at = seed_for("draw", self._config.seed, self._draws) % len(self._pool)
        self._draws += 1
        self._pool[at], self._pool[-1] = self._pool[-1], self._pool[at]
        return self._pool.pop()

    def _epoch_small(self) -> bool:
        """Whether the source is too small to fill the pool: then an epoch is drained before the next begins."""
        return self._corpus.drawn < POOL_PIECES

    def _pieces(self, number: int) -> list[Document]:
        """A document's usable pieces; empty when it cannot be used, which is counted."""
        name = self._corpus.name(number)
        try:
            ids, mask = encode(self._corpus.read(number), self._tokenizer)
            if ids.numel() and int(ids.max()) >= self._vocab_size:
                raise DataError(
                    f"{name}: token {int(ids.max())} lies outside the target's vocabulary ({self._vocab_size} rows); "
                    "the data was tokenised for another model"
                )
            if bool((ids == self._mask_token_id).any()):
                raise BadDocument(name, "contains the MASK token")
            size = self._config.max_document_tokens
            pieces = [
                Document(f"{name}@{start}", ids[start : start + size], mask[start : start + size])
                for start in range(0, ids.shape[0], size)
            ]
            usable = [piece for piece in pieces if piece.trainable]
            if not usable:
                raise BadDocument(name, NOTHING_TO_LEARN)
        except BadDocument as error:
            # A short or empty document is no mistake in the data.
            if self._config.strict and error.reason != NOTHING_TO_LEARN:
                raise DataError(f"{error}; mend the data, or leave data.strict off to skip and count") from error
            self.skipped[error.reason] += 1
            complaint = str(error)
            bad = error.reason != NOTHING_TO_LEARN and complaint not in self.complaints
            if bad and len(self.complaints) < COMPLAINTS:
                self.complaints.append(complaint)
                self._tell(complaint)
            return []
        return usable


def open_corpus(config: DataConfig, source: DocumentSource | None = None) -> Corpus:
    """The documents of `data.source`, or of the given source, in training order. Raises DataError."""
    if source is None and config.streaming:
        from trainer.data.streaming import open_streamed  # only then is it needed

        return open_streamed(config)
    mapped = source if source is not None else open_source(config.source, config.format)
    return Permuted(mapped, seed=config.seed, heldout=config.heldout_documents)
