"""The persistent device-side input of a training step, and how a batch gets into it.

On a GPU nothing here waits for the device, except that a host buffer is not overwritten while an earlier copy may
still read it (two sets in turn, so that bounds how far the host runs ahead: two steps).

Shape legend: T context tokens, N block slots, D document slots, K captured layers, H target hidden size.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.config import TrainConfig
from trainer.data.batch import HiddenBatch

ROW = ("input_ids_T", "positions_T", "doc_ids_T", "loss_mask_T", "cu_seqlens_D1", "anchors_N", "keep_N")
"""The fields of a PackedBatch that a step reads; the buffers have the same names."""
HOST_SETS = 2


class StepInputs:
    """Fixed-shape buffers of one drafter; used by one thread only."""

    def __init__(self, config: TrainConfig, *, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """`hidden_size` is K * H."""
        tokens, slots = config.data.token_budget, config.data.block_slots
        self.device = device
        self.hidden_TKH = torch.zeros(tokens, hidden_size, dtype=dtype, device=device)
        self.input_ids_T = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.positions_T = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.doc_ids_T = torch.full((tokens,), -1, dtype=torch.int32, device=device)
        self.loss_mask_T = torch.zeros(tokens, dtype=torch.bool, device=device)
        self.cu_seqlens_D1 = torch.zeros(config.data.max_documents + 1, dtype=torch.int32, device=device)
        self.anchors_N = torch.full((slots,), tokens, dtype=torch.int32, device=device)
        self.keep_N = torch.zeros(slots, dtype=torch.bool, device=device)
        self.tokens = torch.zeros((), dtype=torch.float32, device=device)
        """Context tokens that are not padding."""
        self._host: list[_HostSet] = []
        if device.type == "cuda":
            self._host = [_HostSet({name: getattr(self, name) for name in ROW}) for _ in range(HOST_SETS)]
        self._loads = 0
        self._foreign: dict[torch.device, Any] = {}

    def load(self, batch: HiddenBatch) -> None:
        """Copy a batch in. Raises ValueError if a shape differs from the run's."""
        packed = batch.packed
        for name, source in (("hidden_TKH", batch.hidden_TKH), *((name, getattr(packed, name)) for name in ROW)):
            if source.shape != getattr(self, name).shape:
                raise ValueError(
                    f"batch {packed.index}: {name} has shape {tuple(source.shape)}, the step was built for "
                    f"{tuple(getattr(self, name).shape)}; shapes are fixed for the whole run"
                )
        with torch.no_grad():
            self._load_hidden(batch)
            self.tokens.fill_(float(packed.tokens))
            if not self._host:
                for name in ROW:
                    getattr(self, name).copy_(getattr(packed, name))
                return
            host = self._host[self._loads % HOST_SETS]
            self._loads += 1
            host.free.synchronize()
            for name in ROW:
                host.tensors[name].copy_(getattr(packed, name))
                getattr(self, name).copy_(host.tensors[name], non_blocking=True)
            host.free.record(torch.cuda.current_stream(self.device))

    def _load_hidden(self, batch: HiddenBatch) -> None:
        source = batch.hidden_TKH
        if not source.is_cuda or self.device.type != "cuda":
            self.hidden_TKH.copy_(source)
            return
        # A copy between devices runs on the calling thread's current stream of the SOURCE device, and both devices'
        # current streams wait for each other around it. That would be the source's default stream; use our own.
        with torch.cuda.stream(self._stream_on(source.device)):
            stream = torch.cuda.current_stream(source.device)
            if batch.ready is not None:
                stream.wait_event(batch.ready)
            self.hidden_TKH.copy_(source, non_blocking=True)
        # The block belongs to the producer's stream: it must not be reused before this copy has read it.
        source.record_stream(stream)

    def _stream_on(self, device: torch.device) -> Any:
        """This thread's stream on a device: the current one on its own, a private one elsewhere."""
        if device == self.device:
            return torch.cuda.current_stream(device)
        if device not in self._foreign:
            self._foreign[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self._foreign[device]

    def fill_with_noise(self, *, seed: int, vocab_size: int) -> None:
        """A synthetic batch with every slot in use: one document over the whole row, anchors spread evenly."""
        # Drawn on the device: a real row of hidden states has a billion values.
        generator = torch.Generator(self.device).manual_seed(seed)
        tokens, slots = self.input_ids_T.shape[0], self.anchors_N.shape[0]
        row = torch.arange(tokens)
        with torch.no_grad():
            self.hidden_TKH.normal_(generator=generator)
            self.input_ids_T.random_(0, vocab_size, generator=generator)
            self.positions_T.copy_(row)
            self.doc_ids_T.zero_()
            self.loss_mask_T.fill_(True)
            self.cu_seqlens_D1.fill_(tokens)
            self.cu_seqlens_D1[0] = 0
            self.anchors_N.copy_(torch.arange(slots) * max(tokens - 1, 1) // slots)
            self.keep_N.fill_(True)
            self.tokens.fill_(float(tokens))


class _HostSet:
    """Pinned copies of a packed row's tensors, and when they may be written again."""

    def __init__(self, like: dict[str, torch.Tensor]) -> None:
        self.tensors = {name: torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for name, x in like.items()}
        self.free: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
