"""What the GPU tests run, each in a process of its own: `python -m tests.trainer.gpu.cases NAME [DEVICES]`.

DEVICES, as cuda:0,cuda:1, are those of the cases over several devices (default: every GPU). The cases are functions of
the modules beside this one, by subject.

A process of its own because these are the failures themselves: some hang, some leave CUDA or Dynamo in a state that no
later test could use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from trainer import torch_setup

torch_setup.set_environment()

# The environment comes first.
from tests.trainer.gpu import exchange_cases, gate_cases, handoff_cases, step_cases, target_cases  # noqa: E402
from tests.trainer.gpu.setting import DEVICE  # noqa: E402


def compiled_target_rows() -> None:
    target_cases.compiled_rows(DEVICE, fp8=False)


def compiled_target_rows_in_8_bits() -> None:
    target_cases.compiled_rows(DEVICE, fp8=True)


def hybrid_target_rows() -> None:
    target_cases.hybrid_rows(DEVICE)


def target_rows_never_wait_for_the_device() -> None:
    target_cases.rows_never_wait(DEVICE)


def case(name: str) -> Callable[[], None]:
    """The case of that name, in whichever module it is."""
    for module in (sys.modules[__name__], step_cases, gate_cases, handoff_cases, exchange_cases):
        if hasattr(module, name):
            found: Callable[[], None] = getattr(module, name)
            return found
    sys.exit(f"no case {name!r}; names.py lists them")


if __name__ == "__main__":
    case(sys.argv[1])()
    print("ok")
    sys.stdout.flush()
    # Not a normal exit: a hung thread would keep the interpreter from ending.
    os._exit(0)
