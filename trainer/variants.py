"""The named variants: each returns a whole TrainConfig. The command line picks one and overrides fields."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace

from trainer.config import (
    ConfigError,
    DataConfig,
    DrafterConfig,
    LossConfig,
    OptimConfig,
    RunConfig,
    TargetConfig,
    TrainConfig,
    override,
)
from trainer.data.reuse import check_reuse
from trainer.topology import Hardware, check_topology, default_topology

Variant = Callable[[TrainConfig], TrainConfig]


def threadwarm(recipe: TrainConfig) -> TrainConfig:
    """Compiled FlexAttention; the whole step as a CUDA graph, captured and replayed on the drafter's own thread."""
    return replace(recipe, variant="threadwarm", attention="flex", graphs="step", compile=True)


def flex(recipe: TrainConfig) -> TrainConfig:
    """Compiled FlexAttention, no CUDA graph."""
    return replace(recipe, variant="flex", attention="flex", graphs="none", compile=True)


def graphwarm(recipe: TrainConfig) -> TrainConfig:
    """Compiled FlexAttention with compiler-managed CUDA graphs; needs torch 2.13 or newer in threads."""
    return replace(recipe, variant="graphwarm", attention="flex", graphs="compiler", compile=True)


def sdpa(recipe: TrainConfig) -> TrainConfig:
    """Chunked SDPA, nothing compiled, no warm-up needed: the slow and simple one."""
    target = replace(recipe.target, compile=False)
    return replace(recipe, variant="sdpa", attention="sdpa", graphs="none", compile=False, target=target)


VARIANTS: dict[str, Variant] = {v.__name__: v for v in (threadwarm, flex, graphwarm, sdpa)}
DEFAULT_VARIANT = "threadwarm"


def tiny_recipe(hardware: Hardware) -> TrainConfig:
    """For the shipped tiny target: a drafter that learns in a minute or two on two CPU cores.

    A narrow window makes the difference: over a whole row of 512 tokens, attention starts with 1/500 of its weight
    on the anchor, and a short run hardly finds it; with a window of 12 it learns from the first steps, and the
    gathered window costs a fraction of the masked row. gamma 2 weighs the first drafted tokens, which decide
    acceptance while a drafter is young.
    """
    return TrainConfig(
        variant=DEFAULT_VARIANT,
        target=TargetConfig(path="tiny", num_features=3, dtype="bfloat16" if hardware.gpus else "float32"),
        drafter=DrafterConfig(
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            intermediate_size=256,
            block_size=8,
            sliding_window=12,
            sliding_layers=(0, 1),
        ),
        data=DataConfig(
            token_budget=512, block_slots=128, max_documents=8, max_document_tokens=512, heldout_documents=32
        ),
        loss=LossConfig(gamma=2.0, chunk_rows=1024),
        optim=OptimConfig(lr=5e-3, betas=(0.9, 0.98)),
        topology=default_topology(hardware),
        run=RunConfig(
            max_steps=800, log_every=20, eval_every=200, checkpoint_every=200, gate_deadline_s=300.0, decode_prompts=4
        ),
    )


def full_recipe(hardware: Hardware, path: str) -> TrainConfig:
    """For a real target: the published recipe."""
    return TrainConfig(
        variant=DEFAULT_VARIANT,
        target=TargetConfig(path=path),
        topology=default_topology(hardware),
    )


def config_for(variant: str, overrides: Mapping[str, str], hardware: Hardware) -> TrainConfig:
    """Recipe, then variant, then overrides (dotted keys, values as text); checked against the hardware.

    Raises ConfigError: unknown variant or key, wrong value, device that does not exist.
    """
    if variant not in VARIANTS:
        near = difflib.get_close_matches(variant, VARIANTS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"unknown variant {variant!r}{hint}; the variants are {', '.join(VARIANTS)}")
    path = overrides.get("target.path", "tiny")
    recipe = tiny_recipe(hardware) if path == "tiny" else full_recipe(hardware, path)
    config = override(VARIANTS[variant](recipe), dict(overrides))
    check_topology(config.topology, hardware)
    check_reuse(config)
    return config
