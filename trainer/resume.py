"""Which checkpoint a run goes on from, and whether the two fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint import CheckpointCorrupt, CheckpointError, CheckpointStore, Loaded
from trainer.config import ConfigError, TrainConfig, flatten, to_dict


class CheckpointMismatch(CheckpointError):
    """The checkpoint belongs to another configuration."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Where to go on from; `loaded` is None for a fresh start."""

    loaded: Loaded | None
    notes: list[str]


def choose_checkpoint(config: TrainConfig, store: CheckpointStore) -> Resume:
    """What run.resume asks for, verified and compared with the configuration.

    Raises CheckpointError, and ConfigError where the request makes no sense.
    """
    wanted = config.run.resume
    store.clean()
    if wanted is None:
        return Resume(None, [])
    notes: list[str] = []
    if wanted == "auto":
        newest = store.newest_intact()
        if newest.path is None and newest.skipped:
            raise CheckpointCorrupt(
                f"no checkpoint in {store.directory} is intact: {'; '.join(newest.skipped.values())}. Restore one, or "
                "start a new run directory without --resume"
            )
        for path, reason in newest.skipped.items():
            aside = store.set_aside(path)
            notes.append(f"--resume auto passed over a damaged checkpoint: {reason}; it is {aside.name} now")
        if newest.path is None:
            return Resume(None, [*notes, f"--resume auto found no checkpoint in {store.directory}: a fresh start"])
        path = newest.path
    else:
        path = Path(wanted)
    loaded = store.load(path)
    if later := store.later_than(loaded.progress.step):
        raise ConfigError(
            f"{store.directory} holds checkpoints of later steps than {path} ({', '.join(p.name for p in later)}): the "
            "next --resume auto would go on from those. Choose another --run-dir, or --resume auto"
        )
    notes += compare_config(loaded.config, config)
    if loaded.progress.step >= config.run.max_steps:
        raise ConfigError(
            f"{path} is at step {loaded.progress.step} and run.max_steps is {config.run.max_steps}: nothing is left to "
            "do; raise it with --set run.max_steps=..."
        )
    return Resume(loaded, notes)


EXECUTION_KEYS = frozenset(
    {
        "variant",
        "attention",
        "graphs",
        "compile",
        "step.fp8",
        "step.recompute",
        "step.recompute_mlps",
        "target.compile",
        "target.packing",
    }
)
"""How the same mathematics is executed. They may change on resume; the bits then may too."""


def compare_config(saved: dict[str, Any], config: TrainConfig) -> list[str]:
    """Refuse a checkpoint of another configuration; returns notes about differences that are allowed.

    Allowed: `run.*` except the seed, devices as long as the number of drafters stays, and EXECUTION_KEYS.
    Raises CheckpointMismatch listing every differing key.
    """
    # A setting that the checkpoint's release did not have yet was at what is the default now.
    old = flatten(to_dict(TrainConfig(variant=config.variant))) | flatten(saved)
    new = flatten(to_dict(config))
    notes: list[str] = []
    refused: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        was, now = old.get(key, "absent"), new.get(key, "absent")
        if was == now or (key.startswith("run.") and key not in ("run.seed", "run.max_steps")):
            continue
        line = f"{key}: {was} in the checkpoint, {now} now"
        if key == "run.max_steps":
            notes.append(f"{line}; the learning rate follows the new length")
        elif key in EXECUTION_KEYS:
            notes.append(f"{line}; same mathematics, not the same bits")
        elif key.startswith("topology."):
            if key == "topology.drafter" and len(was) != len(now):
                refused.append(f"{line} (the number of drafters is part of the batch size)")
        else:
            refused.append(line)
    if refused:
        raise CheckpointMismatch(
            "the checkpoint was made with another configuration:\n  "
            + "\n  ".join(refused)
            + "\nresume with the old values, or start a new run directory without --resume"
        )
    return notes
