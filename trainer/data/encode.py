"""A document into tokens and a loss mask."""

from __future__ import annotations

import re
from typing import Any

import torch

from trainer.data.documents import BadDocument, RawDocument

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode(raw: RawDocument, tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids int64, loss_mask bool). Text is supervised throughout, a conversation in its assistant turns.

    Raises BadDocument where the chat template cannot say which tokens the assistant wrote.
    """
    if raw.input_ids is not None:
        ids, mask = raw.input_ids, raw.loss_mask
    elif raw.messages is not None:
        ids, mask = encode_messages(raw.name, raw.messages, tokenizer)
    else:
        text = whole_characters(raw.name, raw.text or "")
        ids, mask = tokenizer(text, add_special_tokens=False)["input_ids"], None
    input_ids = torch.tensor(ids, dtype=torch.int64)
    if mask is None:
        return input_ids, torch.ones(input_ids.shape[0], dtype=torch.bool)
    return input_ids, torch.tensor(mask, dtype=torch.bool)


def whole_characters(where: str, text: str) -> str:
    """The text itself. Raises BadDocument for half a surrogate pair: JSON may hold one, and no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadDocument(where, "text with half a surrogate pair, which is no character") from error
    return text


def encode_messages(where: str, messages: list[dict[str, str]], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Tokens of a rendered conversation and which of them the assistant wrote, its end of turn included.

    By the template's own generation marks; without marks, by rendering the conversation up to each assistant
    turn with and without it.
    """
    template = tokenizer.get_chat_template()
    for message in messages:
        whole_characters(where, message["content"])
    try:
        if _GENERATION.search(template):
            done = tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return list(done["input_ids"]), [bool(m) for m in done["assistant_masks"]]
        spans = assistant_spans(messages, tokenizer)
        text = _render(messages, tokenizer)
    except BadTemplate as error:
        raise BadDocument(where, str(error)) from error
    except Exception as error:  # a template is a program: it may raise anything about one conversation
        raise BadDocument(where, "the chat template refuses it", detail=str(error)) from error
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [any(a <= start and end <= b for a, b in spans) and end > start for start, end in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), mask


class BadTemplate(ValueError):
    """The template does not let assistant turns be told apart."""


def assistant_spans(messages: list[dict[str, str]], tokenizer: Any) -> list[tuple[int, int]]:
    """Character spans of the assistant's turns in the rendered conversation."""
    whole = _render(messages, tokenizer)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(messages[:number], tokenizer, add_generation_prompt=True) if number else ""
        after = _render(messages[: number + 1], tokenizer)
        if not (after.startswith(before) and whole.startswith(after)):
            raise BadTemplate(
                "the chat template rewrites earlier turns and marks none: no loss mask can be read off it"
            )
        spans.append((len(before), len(after)))
    return spans


def _render(messages: list[dict[str, str]], tokenizer: Any, *, add_generation_prompt: bool = False) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    return text
