"""Does the run fit its GPUs? Asked before anything is loaded, answered by role and device.

The estimate is arithmetic on shapes, and was checked against a measurement: a 27B-shape drafter step with 4 x 4096
tokens and 2,048 blocks of 16 peaked at 55.0 GB, two spare batches of 0.84 GB among them (docs/benchmarks.md); this says
53.4 for one without them.

Shape legend: P drafter parameters, T context tokens, N block slots, B block size, Q = N * B, K captured layers, H
hidden size, V vocabulary, F intermediate size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.collectives import PIECE, choose
from trainer.config import ConfigError, TrainConfig
from trainer.data.reuse import ReusePlan
from trainer.model.target_models import TargetFacts

CONTEXT_BYTES = 1_000_000_000
"""One CUDA context with its libraries' workspaces."""
NCCL_BYTES = 600_000_000
"""32 channels, both directions, 4 MiB a buffer and the smaller protocols' beside it: NCCL's defaults, not measured."""
GB = 1e9


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one role will hold on one device."""

    role: str
    device: str
    bytes: int


def drafter_parameters(config: TrainConfig, facts: TargetFacts) -> int:
    """P: projections and fusion; norms are too small to matter."""
    drafter, hidden = config.drafter, facts.hidden_size
    heads, kv_heads = drafter.num_heads * drafter.head_dim, drafter.num_kv_heads * drafter.head_dim
    layer = hidden * (2 * heads + 2 * kv_heads) + 3 * hidden * drafter.intermediate_size
    return drafter.num_layers * layer + facts.features * hidden * hidden


def needs(config: TrainConfig, facts: TargetFacts) -> list[Need]:
    """Every role's need on its GPU; roles on the CPU are left out."""
    topology = config.topology
    holders = dict.fromkeys([*topology.target, *topology.evaluating])
    weights = drafter_parameters(config, facts) * _width(config)
    found = [Need(f"target on {device}", device, _target_bytes(config, facts)) for device in holders]
    batch = config.data.token_budget * facts.features * facts.hidden_size * _width(config)
    for device in topology.target:
        found.append(Need(f"hidden states waiting on {device}", device, batches_held(config) * batch))
    for rank, device in enumerate(topology.drafter):
        # Embedding and head come from the first target; elsewhere they are copied.
        shared = device == topology.target[0]
        copies = copies_held(config) * weights if rank == 0 else 0
        found.append(Need(f"drafter{rank} on {device}", device, _drafter_bytes(config, facts, shared) + copies))
        if exchange := _exchange_bytes(config, facts):
            found.append(Need(f"gradient exchange on {device}", device, exchange))
    for rank, device in enumerate(topology.evaluating):
        found.append(Need(f"verifier{rank} on {device}", device, weights))
    return [need for need in found if need.device != "cpu"]


def batches_held(config: TrainConfig) -> int:
    """Batches of hidden states that one target has made and somebody holds, at most.

    Those that wait in its channels, one in each drafter's hands, its share of what drafters keep for data.reuse, and
    the one that is being written.
    """
    drafters, targets = len(config.topology.drafter), len(config.topology.target)
    kept = (ReusePlan.of(config.data).reservoir - 1) * drafters
    return (config.run.queue_depth + 1) * drafters + -(-kept // targets) + 1


def copies_held(config: TrainConfig) -> int:
    """Copies of the first drafter's weights that exist at once, at most: one by each verifier, one that waits."""
    return 1 + len(config.topology.evaluating)


def check_memory(config: TrainConfig, facts: TargetFacts, free: Mapping[str, int]) -> None:
    """Raises ConfigError for the first device whose roles need more than it has free."""
    by_device: dict[str, list[Need]] = defaultdict(list)
    for need in needs(config, facts):
        by_device[need.device].append(need)
    for device, roles in by_device.items():
        total = CONTEXT_BYTES + sum(need.bytes for need in roles)
        if total > free[device]:
            largest = max(roles, key=lambda need: need.bytes)
            others = [need for need in roles if need is not largest]
            parts = ", ".join(f"{need.role.replace(f' on {device}', '')} {need.bytes / GB:.1f}" for need in roles)
            lean = "" if config.elementwise_again else "step.recompute=elementwise and then "
            whose = f"{largest.role} and its neighbours need" if others else f"{largest.role} needs"
            raise ConfigError(
                f"{whose} about {total / GB:.1f} GB, {free[device] / GB:.1f} free"
                f"{f' ({parts})' if others else ''}. Spread the roles with topology.*, hold less with {lean}"
                "step.recompute_mlps (which costs time), or lower data.token_budget and data.block_slots"
            )


def free_memory(config: TrainConfig) -> dict[str, int]:
    """Free bytes of every GPU in the topology."""
    import torch

    topology = config.topology
    devices = {*topology.target, *topology.drafter, *topology.verifier} - {"cpu"}
    return {device: torch.cuda.mem_get_info(device)[0] for device in sorted(devices)}


def _width(config: TrainConfig) -> int:
    return 2 if config.target.dtype == "bfloat16" else 4


def _target_bytes(config: TrainConfig, facts: TargetFacts) -> int:
    # One document passes at a time: a few hidden-sized and FFN-sized tensors of its length. A whole row needs half as
    # much for each token: it is long enough for the layers' largest tensors to be counted by themselves. `auto` may
    # come to either, and is counted as the larger.
    one_row = config.target.packing != "documents"
    passing = config.data.token_budget * 20 if one_row else config.data.max_document_tokens * 40
    activations = passing * facts.hidden_size * _width(config)
    weights = (facts.parameters - facts.eight_bit_parameters) * _width(config) + facts.eight_bit_parameters
    return weights + activations


def _exchange_bytes(config: TrainConfig, facts: TargetFacts) -> int:
    """What one drafter's exchange holds beside the gradients: pieces of sums, and NCCL's buffers where that is used."""
    topology = config.topology
    if len(topology.drafter) == 1:
        return 0
    # A sum in fp32, and a piece in the gradients' type on its way in and out.
    pieces = min(PIECE, drafter_parameters(config, facts)) * (4 + 2 * _width(config))
    how = choose(config.run.exchange, topology.drafter, (*topology.target, *topology.evaluating))
    return pieces + (NCCL_BYTES if how == "nccl" else 0)


def _drafter_bytes(config: TrainConfig, facts: TargetFacts, shares_target: bool) -> int:
    width, hidden = _width(config), facts.hidden_size
    parameters = drafter_parameters(config, facts)
    masters = 12 * parameters  # fp32 master weight, half of which is the bf16 working weight, and two moments
    gradients = width * parameters
    wide_sum = 4 * parameters if config.optim.micro_steps > 1 and width == 2 else 0
    table = facts.vocab_size * hidden * width
    own_head = not config.step.fp8 or config.loss.labels != "tokens"
    ends = 0 if shares_target else table * (1 + own_head)
    if config.step.fp8:
        ends += 2 * facts.vocab_size * hidden  # the head by rows and by columns, a byte a number
    inputs = config.data.token_budget * facts.features * hidden * width
    held = masters + gradients + wide_sum + ends + inputs
    return held + kept_for_backward(config, facts) + max(_loss_bytes(config, facts), _backward_bytes(config, facts))


def kept_for_backward(config: TrainConfig, facts: TargetFacts) -> int:
    """Bytes that the compiled drafter's forward hands to its backward, as `benchmarks/saved_tensors.py` counts them."""
    drafter, step, width, hidden = config.drafter, config.step, _width(config), facts.hidden_size
    rows, context, layers = config.data.block_slots * drafter.block_size, config.data.token_budget, drafter.num_layers
    heads, kv_heads = drafter.num_heads * drafter.head_dim, drafter.num_kv_heads * drafter.head_dim
    # The last layer goes on with the drafted places alone.
    deep = (layers - 1) * rows + config.data.block_slots * (drafter.block_size - 1)
    # Attention's output; the projections of the context, and of blocks except for the first layer's, which are few.
    kept = layers * rows * heads + layers * context * 2 * kv_heads + (layers - 1) * rows * (heads + 2 * kv_heads)
    elementwise = config.elementwise_again
    if not elementwise:
        # What attention reads; and its output once more, as rows.
        kept += layers * (rows * (heads + 2 * kv_heads) + context * 2 * kv_heads)
        kept += 0 if step.fp8 else deep * heads
    # In 8 bits, what the products of backward read has to be made anew anyway.
    again = elementwise or (config.step_compiled and step.fp8)
    kept += deep * (2 if again else 4) * hidden  # twice the residual stream, and what the norms made of it
    kept += (deep - step.recompute_mlps * rows if step.recompute_mlps < layers else 0) * 2 * drafter.intermediate_size
    kept = width * (kept + (1 if again else 2) * context * hidden)
    if step.fp8:
        # Inputs of `fc` and of the output projection, as their products want them.
        kept += context * facts.features * hidden + (0 if elementwise else layers * rows * heads)
    return kept


def _loss_bytes(config: TrainConfig, facts: TargetFacts) -> int:
    rows = config.data.block_slots * config.drafter.block_size
    chunk = min(config.loss.chunk_rows, rows) * facts.vocab_size
    # Uncompiled, the pass over the logits holds a second copy; in 8 bits their gradient is one of half the size.
    copies = _width(config) * (1 if config.step_compiled else 2) + config.step.fp8
    return chunk * copies + 2 * rows * facts.hidden_size * _width(config)


def _backward_bytes(config: TrainConfig, facts: TargetFacts) -> int:
    """What is alive beside it as the last layer's MLP, the largest part, goes backward."""
    drafter, width = config.drafter, _width(config)
    rows = config.data.block_slots * drafter.block_size
    wide = 4  # gradients of gate, up and their product, and the product made again
    if config.step.recompute_mlps == drafter.num_layers:
        wide += 2  # and gate and up
    quantised = 4 * rows * drafter.intermediate_size if config.step.fp8 else 0  # the wide gradient, both ways round
    return rows * width * (wide * drafter.intermediate_size + 2 * facts.hidden_size) + quantised
