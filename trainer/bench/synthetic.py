"""What a benchmark puts where a run has data and checkpoints, and a thread as a run's stages have one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from trainer import torch_setup
from trainer.checkpoint import CheckpointStore, Snapshot
from trainer.config import TrainConfig
from trainer.data.batch import PackedBatch
from trainer.data.packing import Document, pack

ROWS = 4
"""Different rows, used in turn."""
ResultT = TypeVar("ResultT")


class SyntheticRows:
    """A source without data: a few rows of random tokens, under the numbers that the run asks for."""

    def __init__(self, config: TrainConfig, *, vocab_size: int, documents: int) -> None:
        data = config.data
        length = data.token_budget // documents
        self.rows: list[PackedBatch] = []
        for index in range(ROWS):
            generator = torch.Generator().manual_seed(index)
            texts = [
                Document(
                    f"random {index}.{n}",
                    torch.randint(0, vocab_size - 1, (length,), generator=generator),
                    torch.ones(length, dtype=torch.bool),
                )
                for n in range(documents)
            ]
            self.rows.append(
                pack(
                    texts,
                    index=index,
                    cursor={},
                    token_budget=data.token_budget,
                    block_slots=data.block_slots,
                    max_documents=data.max_documents,
                    run_seed=0,
                    reuse=data.reuse,
                )
            )
        self._next = 0

    def __next__(self) -> PackedBatch:
        index = self._next
        self._next += 1
        return replace(self.rows[index % ROWS], index=index)


class NothingKept(CheckpointStore):
    """A store that writes nothing: a benchmark's weights are of no use."""

    def save(self, snapshot: Snapshot, config: TrainConfig) -> Path:
        return self.directory

    def mark_best(self, step: int, accept_len: float) -> bool:
        return False


def on_thread(role: torch_setup.Role, device: str, work: Callable[[], ResultT]) -> ResultT:
    """Run `work` as the pipeline does: on a thread of its own that entered its role's rules."""
    results: list[ResultT] = []
    errors: list[BaseException] = []

    def life() -> None:
        try:
            with torch_setup.thread_rules(role, device):
                results.append(work())
        except BaseException as error:  # noqa: BLE001  # the caller raises it
            errors.append(error)

    thread = threading.Thread(target=life, name=f"bench-{role}", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
