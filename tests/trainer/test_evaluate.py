"""Teacher-forced acceptance: where it measures, and that it counts what a hand count gives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from benchmarks.setting import SMALLER
from trainer import assembly
from trainer.config import DataConfig, DrafterConfig, TargetConfig
from trainer.data.packing import Document
from trainer.evaluate import Acceptance, acceptance, evaluation_rows, even_anchors
from trainer.model.drafter import Drafter
from trainer.model.target_loading import load_target
from trainer.model.targets import Target
from trainer.topology import Hardware
from trainer.variants import config_for

BLOCK = 4
DATA = DataConfig(token_budget=64, block_slots=8, max_documents=4, max_document_tokens=32)


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TargetConfig(dtype="float32", num_features=2), "cpu")


def document(ids: list[int], mask: list[bool] | None = None) -> Document:
    return Document("d", torch.tensor(ids), torch.tensor(mask if mask is not None else [True] * len(ids)))


def drafter_of(target: Target) -> Drafter:
    config = DrafterConfig(
        num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32, block_size=BLOCK
    )
    return Drafter(target.drafter_shape(config))


def test_anchors_are_evenly_spaced_and_leave_room_for_a_whole_block() -> None:
    """Failed when anchors near the end were kept: their blocks are cut short."""
    assert even_anchors(document(list(range(20))), 100, BLOCK) == list(range(17))
    assert even_anchors(document(list(range(20))), 4, BLOCK) == [2, 6, 10, 14]
    masked = document(list(range(12)), [False] * 6 + [True] * 6)
    assert even_anchors(masked, 100, BLOCK) == [6, 7, 8]
    assert even_anchors(document([1, 2, 3]), 100, BLOCK) == [0, 1], "no whole block: the valid ones"


def test_every_document_is_measured_once_with_its_own_anchors() -> None:
    documents = [document(list(range(n, n + 20))) for n in range(9)]
    rows = evaluation_rows(documents, DATA, BLOCK, 3)
    assert sum(row.documents for row in rows) == 9
    assert all(row.keep_N.sum() == 3 * row.documents for row in rows)
    assert {row.input_ids_T.shape[0] for row in rows} == {64}
    firsts = sorted(int(row.input_ids_T[row.cu_seqlens_D1[n]]) for row in rows for n in range(row.documents))
    assert firsts == list(range(9))


def test_it_counts_what_a_hand_count_gives(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that says what the next tokens are at places 1 and 2 and is wrong at 3.

    Failed when the bonus token was left out.
    """
    drafter = drafter_of(target)
    token_rows = target.head_VH
    documents = [document([20 + (n * 7 + i) % 200 for i in range(20)]) for n in range(3)]
    row = evaluation_rows(documents, DATA, BLOCK, 2)[0]
    wanted = torch.full((8, BLOCK), 5)
    for slot in range(int(row.keep_N.sum())):
        at = int(row.anchors_N[slot])
        wanted[slot, :3] = row.input_ids_T[at : at + 3]
    answers = torch.nn.functional.normalize(token_rows, dim=1)[wanted.flatten()] * 100
    unit = torch.nn.functional.normalize(token_rows, dim=1)
    monkeypatch.setattr(target, "head_VH", unit)
    monkeypatch.setattr(Drafter, "forward", lambda *_: answers)
    result = acceptance(drafter, target, documents, DATA, mask_token_id=1, anchors_per_document=2)
    assert result.rounds == 6
    assert result.mean == 3.0
    assert result.by_position == (1.0, 1.0, 0.0)


def test_an_untrained_drafter_accepts_next_to_nothing(target: Target) -> None:
    documents = [document([20 + (n * 31 + i * 17) % 200 for i in range(30)]) for n in range(4)]
    result = acceptance(drafter_of(target), target, documents, DATA, mask_token_id=1)
    assert 1.0 <= result.mean < 1.2
    assert len(result.by_position) == BLOCK - 1
    assert result.mean == pytest.approx(1 + sum(result.by_position))


def test_nothing_held_out_gives_no_rounds(target: Target) -> None:
    assert acceptance(drafter_of(target), target, [], DATA, mask_token_id=1).rounds == 0


def test_decoding_is_rehearsed_in_the_first_evaluation_and_done_in_the_last(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What decoding compiles or allocates on a GPU then comes behind the gate."""
    asked: list[tuple[int, int]] = []
    real = assembly.decode_acceptance

    def spy(drafter: Drafter, model: Target, prompts: Sequence[torch.Tensor], **rest: int) -> Acceptance:
        asked.append((len(prompts), rest["max_new_tokens"]))
        return real(drafter, model, prompts, **rest)

    monkeypatch.setattr(assembly, "decode_acceptance", spy)
    config = config_for(
        "threadwarm",
        {**SMALLER, "run.decode_prompts": "2", "run.decode_tokens": "24", "target.num_features": "2"},
        Hardware(),
    )
    evaluate = assembly.make_evaluate(config, target, always_decode=False)
    weights = Drafter(target.drafter_shape(config.drafter)).state_dict()
    found = [evaluate(weights, last=last) for last in (False, False, True)]
    assert asked == [(1, 16), (2, 24)]
    assert [bool(evaluation.decoded) for evaluation in found] == [False, False, True]
