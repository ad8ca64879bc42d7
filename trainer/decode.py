"""True speculative decoding, greedy: the drafter drafts, the target verifies, rejected tokens leave no trace.

The same bytes come out as from the target alone, in fewer of its forwards. It is the slow, exact measure of a
drafter; `trainer.evaluate` is the fast one. On text that the target itself writes the two agree.

A hybrid target carries recurrent and convolution states that a rejected token has already changed and that
cannot be cut back like keys and values. So the cache is recorded before each verification and, after a
rejection, put back and advanced over the accepted tokens alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding

from trainer.evaluate import Acceptance
from trainer.model.drafter import Drafter
from trainer.model.mask import attend_sdpa
from trainer.model.targets import Target


@dataclass(frozen=True, slots=True)
class Decoded:
    """What decoding one prompt gave."""

    tokens: tuple[int, ...]
    """New tokens, the prompt left out."""
    rounds: tuple[int, ...]
    """Tokens each whole round yielded, the bonus token included. The last one is left out if a limit cut it."""
    starts: tuple[int, ...]
    """Position of each round's anchor in prompt + tokens."""


class CachedTarget:
    """The whole target with a cache: feed tokens, read logits and captured states, go back to a record."""

    def __init__(self, target: Target) -> None:
        from transformers import DynamicCache

        self._target = target
        self._model = target.model
        self._cache: Any = DynamicCache(config=self._model.config.get_text_config())
        names = inspect.signature(self._model.forward).parameters
        # Renamed within transformers 5.
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    def feed(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens [n]: (their logits [n, V], their captured states [n, K*H])."""
        with self._target.capturing() as states:
            out = self._model(
                input_ids=ids.to(self._target.device)[None], use_cache=True, **{self._cache_name: self._cache}
            )
        return out.logits[0], torch.cat([states[i][0] for i in self._target.layer_ids], dim=-1)

    def record(self) -> list[dict[str, Any]]:
        """Everything the cache holds now. Keys and values are replaced when they grow, so they need no copy."""
        return [
            {name: value if name in ("keys", "values") else _copy(value) for name, value in vars(layer).items()}
            for layer in self._cache.layers
        ]

    def restore(self, record: list[dict[str, Any]]) -> None:
        """Go back to a record; each may be used once."""
        for layer, values in zip(self._cache.layers, record, strict=True):
            layer.__dict__.clear()
            layer.__dict__.update(values)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


@torch.no_grad()
def block_states(
    drafter: Drafter, target: Target, features_TKH: torch.Tensor, anchor_token: int, mask_token_id: int
) -> torch.Tensor:
    """The drafter's states [B, H] for one block whose anchor follows T tokens with known states."""
    parameter = next(drafter.parameters())
    device, dtype, size = parameter.device, parameter.dtype, drafter.shape.block_size
    known = features_TKH.shape[0]
    ids_B = torch.full((size,), mask_token_id, device=device)
    ids_B[0] = anchor_token
    attend = attend_sdpa(
        torch.tensor([known], dtype=torch.int32, device=device),
        torch.ones(1, dtype=torch.bool, device=device),
        torch.zeros(known, dtype=torch.int32, device=device),
        drafter.shape,
    )
    states: torch.Tensor = drafter(
        features_TKH.to(device, dtype),
        torch.arange(known, device=device),
        embedding(ids_B, target.embed_VH.to(device, dtype)),
        known + torch.arange(size, device=device),
        attend,
    )
    return states


@torch.no_grad()
def draft(
    drafter: Drafter, target: Target, features_TKH: torch.Tensor, anchor_token: int, mask_token_id: int
) -> torch.Tensor:
    """Draft one block: block_size - 1 tokens, int64, on the drafter's device."""
    states_BH = block_states(drafter, target, features_TKH, anchor_token, mask_token_id)
    return (states_BH[1:] @ target.head_VH.to(states_BH.device, states_BH.dtype).T).argmax(-1)


@torch.no_grad()
def speculative_decode(
    drafter: Drafter, target: Target, prompt: torch.Tensor, *, max_new_tokens: int, mask_token_id: int
) -> Decoded:
    """Continue a prompt (int64 [n], n >= 1) greedily until `max_new_tokens` or the end token."""
    end_tokens = _end_tokens(target)
    cached = CachedTarget(target)
    logits, features = cached.feed(prompt)
    tokens = [int(logits[-1].argmax())]
    rounds: list[int] = []
    starts: list[int] = []
    size = drafter.shape.block_size
    while len(tokens) < max_new_tokens and tokens[-1] not in end_tokens:
        starts.append(len(prompt) + len(tokens) - 1)
        drafted = draft(drafter, target, features, tokens[-1], mask_token_id).cpu()
        record = cached.record()
        block = torch.cat((torch.tensor([tokens[-1]]), drafted))
        logits, states = cached.feed(block)
        said = logits.argmax(-1).cpu()
        accepted = int((drafted == said[:-1]).long().cumprod(0).sum())
        if accepted < size - 1:
            cached.restore(record)
            cached.feed(block[: accepted + 1])
        features = torch.cat((features, states[: accepted + 1]))
        fresh = [*drafted[:accepted].tolist(), int(said[accepted])]
        kept = _until_end(fresh, end_tokens)[: max_new_tokens - len(tokens)]
        tokens += kept
        if len(kept) == len(fresh):
            rounds.append(accepted + 1)
        else:
            starts.pop()
    return Decoded(tuple(tokens), tuple(rounds), tuple(starts))


@torch.no_grad()
def greedy_decode(target: Target, prompt: torch.Tensor, *, max_new_tokens: int) -> list[int]:
    """The target alone, one token a forward: what `speculative_decode` must reproduce."""
    cached, end_tokens = CachedTarget(target), _end_tokens(target)
    logits, _ = cached.feed(prompt)
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < max_new_tokens and tokens[-1] not in end_tokens:
        logits, _ = cached.feed(torch.tensor(tokens[-1:]))
        tokens.append(int(logits[-1].argmax()))
    return tokens


def decode_acceptance(
    drafter: Drafter, target: Target, prompts: Sequence[torch.Tensor], *, max_new_tokens: int, mask_token_id: int
) -> Acceptance:
    """Acceptance over the whole rounds of all prompts."""
    rounds: list[int] = []
    for prompt in prompts:
        rounds += speculative_decode(
            drafter, target, prompt, max_new_tokens=max_new_tokens, mask_token_id=mask_token_id
        ).rounds
    size = drafter.shape.block_size
    if not rounds:
        return Acceptance(mean=0.0, by_position=(0.0,) * (size - 1), rounds=0)
    by_position = tuple(sum(r > k for r in rounds) / len(rounds) for k in range(1, size))
    return Acceptance(mean=sum(rounds) / len(rounds), by_position=by_position, rounds=len(rounds))


def _end_tokens(target: Target) -> set[int]:
    end = target.model.config.get_text_config().eos_token_id
    return set(end) if isinstance(end, list) else {end} - {None}


def _until_end(tokens: list[int], end_tokens: set[int]) -> list[int]:
    for place, token in enumerate(tokens):
        if token in end_tokens:
            return tokens[: place + 1]
    return tokens
