"""The device side of the gradient exchange: sums over the replicas' buffers, by peer copies or by NCCL.

Streams, for both ways: a replica's buffers belong to its own thread's stream. Its seat carries an event that was
recorded there after its gradients; whoever reads or writes the buffers waits for that event first, and the replica's
stream waits for the sum's own event before it goes on. No host waits for a device.

Peer copies: each element is added in the order of the ranks, in fp32 or wider, by one thread, and the result is copied
to everyone. NCCL: drafters that share a device are summed there first, then one all-reduce runs over the devices. Its
order is NCCL's, but every value is reduced once and handed on as it is (in rings and trees alike), so the replicas
still end with the same bits. NVIDIA does not promise that in words; `trainer.reduce` compares the weights at every
checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trainer.config import ConfigError

How = Literal["peer", "nccl"]
PIECE = 1 << 25
"""Elements summed at once: bounds what the sum needs beside the gradients (three pieces, 0.3 GB)."""
ALIGN = 64
"""Slices and pieces begin at a multiple of this many elements, so that every copy and sum is vectorised."""
NCCL_ENVIRONMENT = {
    # Between devices of one process NCCL reads user buffers directly, unless told not to. Memory of expandable segments
    # is mapped on a peer only where torch enabled that, so direct access could fault.
    "NCCL_P2P_DIRECT_DISABLE": "1",
    # Reduction inside the switch reserves multicast memory on the host's whole fabric and gains nothing at two to five
    # devices: an exchange is a hundredth of a step.
    "NCCL_NVLS_ENABLE": "0",
}
"""Set before the first NCCL call; values given from outside win."""


@dataclass(frozen=True, slots=True)
class Seat:
    """What one rank brings to an exchange."""

    tensors: tuple[torch.Tensor, ...]
    note: Any
    ready: Any = None
    """Event after the work that fills the tensors; None on CPU."""
    stream: Any = None
    """The stream that owns them; None on CPU."""

    @classmethod
    def of(cls, tensors: tuple[torch.Tensor, ...], note: Any) -> Seat:
        """Made on the rank's own thread, whose current stream owns the tensors."""
        if not tensors or not tensors[0].is_cuda:
            return cls(tensors, note)
        return cls(tensors, note, record(tensors[0]), torch.cuda.current_stream(tensors[0].device))

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device


def record(tensor: torch.Tensor) -> Any:
    """An event on the calling thread's current stream after the work queued so far; None on CPU."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def choose(wanted: str, drafters: Sequence[str], others: Collection[str]) -> How:
    """How the drafters on these devices exchange; `others` are the devices of the other roles.

    NCCL's kernels wait for each other, so all of them must be launched. A call in another thread that waits for one
    of the devices (a cudaMalloc, the first use of a kernel) may come between two launches and hold up the second:
    both then wait for ever. Peer copies cannot do that. So `auto` takes NCCL only where no other role has a drafter's
    device. Raises ConfigError where NCCL is asked for by name and cannot be had.
    """
    distinct = set(drafters)
    usable = len(distinct) > 1 and not any(device == "cpu" for device in distinct) and nccl_built()
    if wanted == "nccl" and not usable:
        raise ConfigError(
            f"run.exchange=nccl needs drafters on two or more GPUs and a torch with NCCL; they are on "
            f"{', '.join(drafters)}. Leave run.exchange at auto"
        )
    if wanted == "auto":
        return "nccl" if usable and not distinct & set(others) else "peer"
    return "nccl" if wanted == "nccl" else "peer"


def nccl_built() -> bool:
    """Whether this torch can all-reduce over several devices of one process."""
    return hasattr(torch._C, "_nccl_all_reduce")


class PeerSum:
    """Every rank sums its slice of all buffers and writes it back to all; the ranks work side by side."""

    def __init__(self) -> None:
        self._streams: dict[tuple[int, torch.device], Any] = {}

    def rehearse(self, seats: Sequence[Seat]) -> None:
        """Open peer access between all pairs of devices: the first copy of a pair does it, and may wait for both."""
        devices = list(dict.fromkeys(seat.device for seat in seats))
        for rank, seat in enumerate(seats):
            for device in devices:
                if device != seat.device:
                    self._stream(rank, device)
        for source in devices:
            for target in devices:
                torch.zeros(1, device=source).to(target)

    def add(self, rank: int, seats: Sequence[Seat]) -> None:
        """Rank `rank`'s part of the sum, queued on the calling thread's streams."""
        own = seats[rank].device
        with torch.no_grad(), ExitStack() as streams:
            for device in dict.fromkeys(seat.device for seat in seats):
                if device != own and device.type == "cuda":
                    # A copy between devices runs on the calling thread's current stream of its source and joins that of
                    # its destination; left alone, that is the other device's default stream, which everyone shares.
                    streams.enter_context(torch.cuda.stream(self._stream(rank, device)))
            for seat in seats:
                if seat.ready is not None:
                    torch.cuda.current_stream(seat.device).wait_event(seat.ready)
                    torch.cuda.current_stream(own).wait_event(seat.ready)
            for index in range(len(seats[rank].tensors)):
                _sum_slice(rank, [seat.tensors[index].view(-1) for seat in seats])

    def _stream(self, rank: int, device: torch.device) -> Any:
        """The rank's private stream on another device."""
        key = rank, device
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self._streams[key]


def _sum_slice(rank: int, flat: Sequence[torch.Tensor]) -> None:
    """Sum one slice over the ranks, in their order, and write it to all."""
    own, world = flat[rank], len(flat)
    low, high = (bound(own.numel(), r, world) for r in (rank, rank + 1))
    for start in range(low, high, PIECE):
        piece = slice(start, min(start + PIECE, high))
        total = wide_sum([tensor[piece] for tensor in flat], own.device)
        for tensor in flat:
            tensor[piece].copy_(total, non_blocking=True)


def bound(length: int, rank: int, world: int) -> int:
    """Where rank `rank`'s slice begins; the last one ends with the buffer."""
    return length if rank == world else length * rank // world // ALIGN * ALIGN


def wide_sum(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum in the given order, in fp32 or wider, on `device`. The parts are copied as they are, then widened."""
    wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    total = torch.empty(parts[0].shape, dtype=wide, device=device)
    total.copy_(parts[0].to(device, non_blocking=True))
    for part in parts[1:]:
        total.add_(part.to(device, non_blocking=True))
    return total


class NcclSum:
    """One all-reduce over the devices, called by one thread for all of them, on the streams that own the buffers.

    The call gives up the interpreter lock. It is not part of any CUDA graph; it runs between two replays.
    """

    def __init__(self) -> None:
        for name, value in NCCL_ENVIRONMENT.items():
            os.environ.setdefault(name, value)

    def add(self, seats: Sequence[Seat]) -> dict[torch.device, Any]:
        """Replace every seat's tensors by their sums; returns the event after it for each device."""
        groups: dict[torch.device, list[Seat]] = {}
        for seat in seats:
            groups.setdefault(seat.device, []).append(seat)
        firsts = [group[0] for group in groups.values()]
        with torch.no_grad():
            for group in groups.values():
                self._gather(group)
            for index in range(len(firsts[0].tensors)):
                torch.cuda.nccl.all_reduce(  # type: ignore[no-untyped-call]  # torch leaves it untyped
                    [seat.tensors[index] for seat in firsts], streams=[seat.stream for seat in firsts]
                )
            return {device: self._spread(group) for device, group in groups.items()}

    def _gather(self, group: list[Seat]) -> None:
        """Sum the drafters of one device into the first of them, on its stream, in the order of their ranks."""
        first = group[0]
        with torch.cuda.stream(first.stream):
            for seat in group:
                first.stream.wait_event(seat.ready)
            for index in range(len(first.tensors) if len(group) > 1 else 0):
                flat = [seat.tensors[index].view(-1) for seat in group]
                for start in range(0, flat[0].numel(), PIECE):
                    pieces = [tensor[start : start + PIECE] for tensor in flat]
                    pieces[0].copy_(wide_sum(pieces, pieces[0].device))

    def _spread(self, group: list[Seat]) -> Any:
        first = group[0]
        with torch.cuda.stream(first.stream):
            for seat in group[1:]:
                for mine, total in zip(seat.tensors, first.tensors, strict=True):
                    mine.copy_(total)
            return record(first.tensors[0])
