"""Random packed rows with anchors, and their mask by the rule, one pair at a time."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from trainer.model.block_tables import ContextSpans, MaskLayout


@st.composite
def cases(draw: st.DrawFn) -> tuple[MaskLayout, dict[str, torch.Tensor]]:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    padding = draw(st.integers(0, 20))
    context = sum(lengths) + padding
    block = draw(st.sampled_from([2, 3, 4, 8]))
    slots = draw(st.integers(1, 12))
    layout = MaskLayout(
        context=context,
        slots=slots,
        block_size=block,
        window=draw(st.one_of(st.none(), st.integers(1, 20))),
        causal=draw(st.booleans()),
        tile=draw(st.sampled_from([8, 16])),
    )
    used = draw(st.integers(0, min(slots, sum(lengths))))
    chosen = sorted(draw(st.lists(st.integers(0, sum(lengths) - 1), min_size=used, max_size=used, unique=True)))
    anchors = torch.tensor(chosen + [context] * (slots - used), dtype=torch.int32)
    keep = torch.arange(slots) < used
    doc_ids = torch.tensor([d for d, n in enumerate(lengths) for _ in range(n)] + [-1] * padding, dtype=torch.int32)
    bounds = [0]
    for n in lengths:
        bounds.append(bounds[-1] + n)
    cu_seqlens = torch.tensor(bounds + [bounds[-1]] * 2, dtype=torch.int32)
    return layout, {"anchors_N": anchors, "keep_N": keep, "doc_ids_T": doc_ids, "cu_seqlens_D1": cu_seqlens}


def pairwise_mask(layout: MaskLayout, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The rule, one pair at a time: strictly before the anchor, same document, inside the window, or the same block."""
    mask = torch.zeros(layout.queries, layout.keys, dtype=torch.bool)
    anchors, docs = batch["anchors_N"].tolist(), batch["doc_ids_T"].tolist()
    for slot in range(layout.slots):
        if not batch["keep_N"][slot]:
            continue
        anchor = anchors[slot]
        for offset in range(layout.block_size):
            row = mask[slot * layout.block_size + offset]
            for key in range(layout.context):
                inside = layout.window is None or key > anchor + offset - layout.window
                row[key] = key < anchor and docs[key] == docs[anchor] and inside
            for other in range(layout.block_size):
                row[layout.context + slot * layout.block_size + other] = not layout.causal or other <= offset
    return mask


def spans_of(layout: MaskLayout, batch: dict[str, torch.Tensor]) -> ContextSpans:
    spans = ContextSpans.empty(layout.slots, torch.device("cpu"))
    spans.fill(**batch)
    return spans
