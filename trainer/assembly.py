"""The real parts of a run, made from its TrainConfig: target, data, drafter steps, evaluation."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch

from trainer import torch_setup
from trainer.config import TrainConfig
from trainer.data.stream import BatchStream
from trainer.decode import decode_acceptance
from trainer.evaluate import Acceptance, TeacherForced
from trainer.export import initialise
from trainer.memory import check_memory, free_memory
from trainer.model.attention import SdpaAttention, layer_layouts
from trainer.model.drafter import Attend, Drafter, DrafterShape
from trainer.model.target_loading import load_target
from trainer.model.target_models import weigh
from trainer.model.targets import Target, WithFinalStates
from trainer.parts import Evaluate, Evaluation, Parts, TargetModel
from trainer.step import TargetEnds, TrainStep


def quiet(text: str) -> None:
    """Nobody wants to hear it."""


def first_drafter(config: TrainConfig, target: Target) -> Drafter:
    """What training begins with, in fp32 on the CPU: a stored drafter, or one drawn from the run's seed."""
    shape = target.drafter_shape(config.drafter)
    if config.drafter.init_from is None:
        return Drafter(shape, torch.Generator().manual_seed(config.run.seed))
    drafter = Drafter.empty(shape, "cpu")
    initialise(drafter, Path(config.drafter.init_from), target.layer_ids)
    return drafter


def drafter_to_load(config: TrainConfig, target: Target) -> Drafter:
    """For a run that is resumed: every weight comes from its checkpoint."""
    return Drafter.empty(target.drafter_shape(config.drafter), "cpu")


def assemble(
    config: TrainConfig,
    say: Callable[[str], None] = quiet,
    *,
    make_drafter: Callable[[TrainConfig, Target], Drafter] = first_drafter,
) -> Parts:
    """Load the target once for each device that needs it, and bind the factories.

    `say` takes lines for the log: what is loaded and how its rows will run, and bad documents, with file and line.
    `make_drafter` gives the one that all drafters begin as.

    Runs in the main thread before any other starts, so nothing compiles beside it.
    Raises TargetError, DataError and ConfigError for what is foreseeable.
    """
    topology = config.topology
    torch_setup.configure_process()
    torch_setup.check_graphs(config.graphs, topology.drafter, torch_setup.torch_version())
    verifiers = topology.evaluating
    if free := free_memory(config):
        check_memory(config, weigh(config.target), free)
    targets = {device: load(config, device, say) for device in dict.fromkeys([*topology.target, *verifiers])}
    first = targets[topology.target[0]]
    ends = TargetEnds(first.embed_VH, first.head_VH, first.mask_token(config.drafter))

    def tell(complaint: str) -> None:
        say(f"skipped   {complaint}")

    def open_source(cursor: dict[str, Any] | None) -> BatchStream:
        stream = open_stream(config, first, tell)
        if cursor is not None:
            stream.seek(cursor)
        return stream

    open_source(None)  # a missing or empty source is told now, not after the warm-up

    def warm(made: TargetModel) -> None:
        cast("Target | WithFinalStates", made).warm_up()

    start: list[Drafter] = []
    """The drafter that all begin as, until the last has it: drawing a 27B target's takes half a minute."""

    def step(rank: int) -> TrainStep:
        if not start:
            start.append(make_drafter(config, first))
        last = rank == len(topology.drafter) - 1
        drafter = start.pop() if last else copy.deepcopy(start[0])
        return TrainStep(config, drafter, ends, topology.drafter[rank])

    def target(rank: int) -> TargetModel:
        loaded = targets[topology.target[rank]]
        return loaded if config.loss.labels == "tokens" else WithFinalStates(loaded)

    return Parts(
        open_source=open_source,
        target=target,
        step=step,
        evaluator=lambda rank: make_evaluate(
            config,
            targets[verifiers[rank]],
            always_decode=verifiers[rank] not in (*topology.target, *topology.drafter),
            tell=tell if rank == 0 else quiet,
        ),
        thread_rules=cast("Callable[[str, str], AbstractContextManager[Any]]", torch_setup.thread_rules),
        on_gate_open=torch_setup.forbid_compilation,
        warm_target=warm if any(targets[device].compiled for device in topology.target) else None,
    )


def load(config: TrainConfig, device: str, say: Callable[[str], None]) -> Target:
    """The run's target on one device."""
    say(f"target    loading {config.target.path} onto {device}")
    began = time.monotonic()
    target = load_target(config.target, device)
    target.fix_row_length(config.data.token_budget)
    rows = {"row": "in one forward", "documents": "document by document"}[target.packing]
    say(
        f"target    loaded onto {device} after {time.monotonic() - began:.1f} s; packed rows run {rows}"
        f"{', compiled' if target.compiled else ''}"
    )
    return target


def open_stream(config: TrainConfig, target: Target, tell: Callable[[str], None] = quiet) -> BatchStream:
    """The run's data from its beginning."""
    return BatchStream(
        config.data,
        target.tokenizer,
        vocab_size=target.vocab_size,
        mask_token_id=target.mask_token(config.drafter),
        run_seed=config.run.seed,
        tell=tell,
    )


def make_evaluate(
    config: TrainConfig, target: Target, *, always_decode: bool, tell: Callable[[str], None] = quiet
) -> Evaluate:
    """Acceptance on the held-out documents, on the target's device: teacher-forced, and truly decoded where it is due.

    Chunked SDPA, uncompiled: an evaluation is a small forward now and then, and must never compile beside
    training drafters.
    """
    mask_token_id, run = target.mask_token(config.drafter), config.run
    documents = open_stream(config, target, tell).heldout()
    heldout = TeacherForced(
        target, documents, config.data, block_size=config.drafter.block_size, mask_token_id=mask_token_id
    )
    # The first half of a held-out document is the prompt.
    prompts = [document.input_ids[: max(1, len(document) // 2)] for document in documents[: run.decode_prompts]]
    shape = target.drafter_shape(config.drafter)
    drafter = Drafter.empty(shape, target.device, target.dtype).requires_grad_(False)
    layouts = layer_layouts(config.drafter, config.data.token_budget, config.data.block_slots)
    attention = SdpaAttention(layouts)

    def attend(anchors_N: torch.Tensor, keep_N: torch.Tensor, doc_ids_T: torch.Tensor, shape: DrafterShape) -> Attend:
        attention.fill(anchors_N, keep_N, doc_ids_T, torch.empty(0))  # SDPA masks by doc_ids alone
        return attention

    rehearsed = False

    def decode(prompts: list[torch.Tensor], tokens: int) -> Acceptance:
        return decode_acceptance(drafter, target, prompts, max_new_tokens=tokens, mask_token_id=mask_token_id)

    def evaluate(weights: dict[str, torch.Tensor], *, last: bool) -> Evaluation:
        nonlocal rehearsed
        drafter.load_state_dict(weights, strict=True)
        found = heldout.measure(drafter, make_attend=attend, chunk_rows=config.loss.chunk_rows)
        decoded = None
        if prompts and (last or always_decode):
            true = decode(prompts, run.decode_tokens)
            if true.rounds:  # a drafter so good that its first round is cut at decode_tokens has none to count
                decoded = Evaluation(true.mean, list(true.by_position), true.rounds)
        elif prompts and not rehearsed:
            # The first evaluation is the verifier's warm-up: kernels that decoding needs, and most of its memory, are
            # had here, behind the gate, and not while the run ends.
            decode([max(prompts, key=len)], min(run.decode_tokens, 2 * config.drafter.block_size))
        rehearsed = True
        return Evaluation(found.mean, list(found.by_position), found.rounds, decoded)

    return evaluate
