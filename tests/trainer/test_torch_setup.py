"""Thread rules and version switches.

Seen to fail: without the call of `apply_torch_config` in the thread (torch 2.12 and newer keep a copy per thread),
with the stance set to "default", with 2.12 let through.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainer import torch_setup
from trainer.graphs import compiled
from trainer.torch_setup import RecompileError, TorchUnfitError


def in_thread(function: Callable[[], Any]) -> Any:
    """The function's result from a thread of its own; its exception is raised here."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append(function())
        except BaseException as error:  # noqa: BLE001  # handed to the caller
            box.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(120)
    assert box, "the thread did not end in time"
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]


@pytest.mark.parametrize("text", ["2.11.0+cu130", "2.13.0", "2.14.1", "2.15.0a0", "3.0"])
def test_supported_versions_pass(text: str) -> None:
    torch_setup.check_supported(torch_setup.parse_version(text))


@pytest.mark.parametrize(
    ("text", "reason"), [("2.10.1", "too old"), ("2.12.0", "deadlock"), ("2.12.1+cpu", "deadlock")]
)
def test_other_versions_are_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(TorchUnfitError, match=reason):
        torch_setup.check_supported(torch_setup.parse_version(text))


def test_compiler_graphs_are_refused_where_they_cannot_work() -> None:
    with pytest.raises(TorchUnfitError, match="variant threadwarm"):
        torch_setup.check_compiler_graphs((2, 11))
    torch_setup.check_compiler_graphs((2, 13))
    with pytest.raises(TorchUnfitError, match=r"this is 2\.11"):
        torch_setup.check_graphs("compiler", ("cuda:0", "cpu"), (2, 11))
    torch_setup.check_graphs("compiler", ("cpu", "cpu"), (2, 11))
    torch_setup.check_graphs("step", ("cuda:0",), (2, 11))


def test_the_environment_is_set_before_torch_and_outside_values_win() -> None:
    code = (
        "import os, sys; from trainer import torch_setup; assert 'torch' not in sys.modules; "
        "torch_setup.set_environment(); print(os.environ['OMP_NUM_THREADS'], os.environ['TOKENIZERS_PARALLELISM'])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"} | {"OMP_NUM_THREADS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=180, check=True
    )
    assert done.stdout.split() == ["3", "false"]


def test_every_thread_has_the_configuration_and_its_role() -> None:
    import torch._dynamo.config
    import torch._functorch.config

    def look(role: torch_setup.Role) -> tuple[bool, ...]:
        with torch_setup.thread_rules(role, "cpu", seed=1) as state:
            assert state.stream is None
            return (
                torch._functorch.config.force_non_lazy_backward_lowering,
                torch._dynamo.config.fail_on_recompile_limit_hit,
                torch.autograd.is_multithreading_enabled(),
                torch.is_grad_enabled(),
            )

    assert in_thread(lambda: look("drafter")) == (True, True, False, True)
    assert in_thread(lambda: look("target")) == (True, True, True, False)
    assert in_thread(lambda: look("verifier")) == (True, True, True, False)
    assert torch.autograd.is_multithreading_enabled()
    assert torch.is_grad_enabled()


def test_each_thread_draws_its_own_numbers() -> None:
    def draw() -> torch.Tensor:
        with torch_setup.thread_rules("drafter", "cpu", seed=7) as state:
            torch.manual_seed(torch.initial_seed())
            return torch.rand(3, generator=state.generator)

    assert torch.equal(in_thread(draw), in_thread(draw))


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_after_the_gate_a_new_shape_is_an_error_in_every_thread_and_names_its_guard() -> None:
    torch_setup.apply_torch_config()
    function = compiled(double, torch.device("cpu"))
    function(torch.ones(3))
    counts = torch_setup.compile_counts()
    torch_setup.forbid_compilation()
    try:
        assert torch.equal(in_thread(lambda: function(torch.ones(3))), torch.full((3,), 2.0))
        torch_setup.check_nothing_compiled(counts)
        with pytest.raises(RuntimeError, match=r"(?s)recompile.*size mismatch"):
            in_thread(lambda: function(torch.ones(4)))
    finally:
        torch_setup.allow_compilation()
    function(torch.ones(5))
    with pytest.raises(RecompileError, match="compiled after the gate opened"):
        torch_setup.check_nothing_compiled(counts)


def test_threads_of_one_device_share_a_compiled_function_and_devices_do_not() -> None:
    one = compiled(double, torch.device("cpu"))
    assert in_thread(lambda: compiled(double, torch.device("cpu"))) is one
    other = compiled(double, torch.device("cuda", 1))
    assert other is not one
    assert other.__wrapped__.__code__ is not one.__wrapped__.__code__


def test_warming_without_gradients_does_not_warm_training() -> None:
    """The trap of a no_grad warm-up: training then needs another graph, and after the gate that is an error."""
    torch_setup.apply_torch_config()
    function = compiled(triple, torch.device("cpu"))
    with torch.no_grad():
        function(torch.ones(3, requires_grad=True))
    torch_setup.forbid_compilation()
    try:
        with pytest.raises(RuntimeError, match=r"(?s)recompile.*grad_mode"):
            function(torch.ones(3, requires_grad=True))
    finally:
        torch_setup.allow_compilation()


def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3
