"""The run in a few lines: the end of the human log and part of the `end` event."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Summary:
    """First and last of what matters. `progress` values survive a resume through the checkpoint."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Since the gate opened, in this process."""
    context_tokens_per_s: float = 0.0
    block_tokens_per_s: float = 0.0
    reused_context_tokens_per_s: float | None = None
    """Of batches that were trained on before; None without data.reuse."""
    loss_first: float | None = None
    loss_last: float | None = None
    accept_len_first: float | None = None
    """Held-out acceptance length of the untrained drafter."""
    accept_len_last: float | None = None
    decode_accept_len: float | None = None
    """Tokens a target forward yields in true speculative decoding with the last weights."""
    checkpoint: str | None = None
    balance: str | None = None
    """The last word on which stage holds the run up."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Documents left out so far, by reason; one that is read in two epochs counts twice."""

    def lines(self) -> list[str]:
        """For the human log."""
        lines = [
            f"steps                 {self.steps}",
            f"context tokens        {self.tokens:,} at {self.context_tokens_per_s:,.0f} tokens/s",
            f"trained on again      {self.reused_context_tokens_per_s or 0.0:,.0f} context tokens/s",
            f"block tokens          {self.block_tokens_per_s:,.0f} tokens/s",
            f"loss                  {_arrow(self.loss_first, self.loss_last, '.4f')}",
            f"held-out acceptance   {_arrow(self.accept_len_first, self.accept_len_last, '.3f')}{self._ratio()}",
            f"truly decoded         {_arrow(None, self.decode_accept_len, '.3f')} tokens a target forward",
            f"balance               {self.balance or 'too few steps to tell'}",
            f"checkpoint            {self.checkpoint or 'none was due'}",
            f"documents left out    {', '.join(f'{n} {reason}' for reason, n in self.skipped.items()) or 'none'}",
        ]
        if self.decode_accept_len is None:
            lines = [line for line in lines if not line.startswith("truly decoded")]
        if self.reused_context_tokens_per_s is None:
            lines = [line for line in lines if not line.startswith("trained on again")]
        return ["summary", *(f"  {line}" for line in lines)]

    def _ratio(self) -> str:
        if not self.accept_len_first or self.accept_len_last is None:
            return ""
        return f"  ({self.accept_len_last / self.accept_len_first:.2f} x)"


class SummaryKeeper:
    """Collects the summary from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._summary = Summary()

    @property
    def summary(self) -> Summary:
        with self._lock:
            return self._summary

    def update(self, **changes: Any) -> None:
        """Replace fields; a `..._first` that is already known stays."""
        with self._lock:
            kept = {
                key: value
                for key, value in changes.items()
                if not (key.endswith("_first") and getattr(self._summary, key) is not None)
            }
            self._summary = replace(self._summary, **kept)


def _arrow(first: float | None, last: float | None, form: str) -> str:
    if last is None:
        return "not measured"
    return f"{format(last, form)}" if first is None else f"{format(first, form)} -> {format(last, form)}"
