"""fp32 master weights in two halves: the bf16 working weight, and 16 bits with which the master can be put together.

A bf16 number is the upper half of an fp32 number, rounded to nearest, ties to even. So a master and its working copy
hold the same upper bits twice, 2 bytes a weight. With `rest` = the lower half as a signed number,

    master's bits = (working weight's bits << 16) + rest,

where rounding up is what makes `rest` negative. One case stays open: a tie. Halfway below an even upper half and
halfway above it round to the same working weight, and both have a rest of -32768. So many fp32 numbers share an even
bf16 number that 16 bits cannot tell them apart: 65,537. The bit that is missing is `kept`: the rest is negative and
the upper half was kept all the same. The optimizer has a place for it: the sign of the second moment, never negative.

NaN is cut, not rounded (rounding its bits could make a zero of it), and comes back as the NaN it was unless it was a
signalling one, which arithmetic does not make.

Everything is arithmetic on int32 without overflow, so that it means the same to eager torch and to both code
generators, and fuses with the update around it.
"""

from __future__ import annotations

import torch

INFINITY = 0x7F800000
QUIET = 0x40
"""The bit of a bf16 number that makes a NaN a quiet one: without it, cutting might leave an infinity."""


def split(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp32 bit patterns (int32) -> (bf16 bit patterns, rest), both int16, and `kept`, int32 0 or 1."""
    upper, low = bits >> 16, bits & 0xFFFF
    rounded = upper + (low + (upper & 1) > 0x8000)
    working = torch.where((bits & 0x7FFFFFFF) > INFINITY, upper | QUIET, rounded)
    rest = low - ((low & 0x8000) << 1)
    kept = ((rest < 0) & (working == upper)).to(torch.int32)
    return working.to(torch.int16), rest.to(torch.int16), kept


def joined(working: torch.Tensor, rest: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The inverse of `split`: fp32 bit patterns, int32."""
    return (working.to(torch.int32) << 16) + (rest.to(torch.int32) + (kept << 16))
