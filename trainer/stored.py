"""Commands over a stored checkpoint: `eval` and `export`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trainer.assembly import make_evaluate
from trainer.checkpoint import CheckpointStore, Loaded
from trainer.config import ConfigError, TrainConfig, from_dict
from trainer.export import Format, export
from trainer.export_forms import Provenance
from trainer.foreseen import FORESEEN
from trainer.model.target_loading import load_target
from trainer.topology import default_topology, probe_hardware
from trainer.torch_setup import configure_process, thread_rules


def evaluate_checkpoint(directory: str, *, as_json: bool) -> int:
    """Held-out acceptance length of a stored drafter, on the devices of this machine."""

    def command() -> None:
        loaded, config = _load(directory)
        device = config.topology.verifier[0]
        with thread_rules("verifier", device):
            target = load_target(config.target, device)
            found = make_evaluate(config, target, always_decode=True)(loaded.weights, last=True)
        step = loaded.progress.step
        if as_json:
            row: dict[str, object] = {"checkpoint": directory, "step": step, "accept_len": found.accept_len}
            row |= {"by_position": found.by_position, "blocks": found.blocks}
            if found.decoded is not None:
                row |= {"decode_accept_len": found.decoded.accept_len, "decode_by_position": found.decoded.by_position}
            print(json.dumps(row))
        else:
            print(f"step {step}: held-out acceptance length {found.accept_len:.3f} ({found.blocks} blocks)")
            print("by position " + " ".join(f"{share:.2f}" for share in found.by_position))
            if found.decoded is not None:
                print(f"truly decoded: {found.decoded.accept_len:.3f} tokens a target forward")

    return _guarded(command)


def export_checkpoint(directory: str, *, form: Format, out: str, as_json: bool) -> int:
    """Write a stored drafter in a published form; what is written was read back and compared."""

    def command() -> None:
        loaded, config = _load(directory)
        target = load_target(config.target, config.topology.verifier[0])
        path = export(
            loaded.weights,
            target.drafter_shape(config.drafter),
            Provenance.of(target, config.drafter),
            Path(out),
            form,
            embed_VH=target.embed_VH,
            head_VH=target.head_VH,
        )
        if as_json:
            print(json.dumps({"checkpoint": directory, "step": loaded.progress.step, "format": form, "out": str(path)}))
        else:
            print(f"step {loaded.progress.step} as {form}: {path}, read back and equal")

    return _guarded(command)


def _load(directory: str) -> tuple[Loaded, TrainConfig]:
    path = Path(directory)
    loaded = CheckpointStore(path.parent).load(path)
    # Where it was trained does not matter here: this machine's devices do.
    config = replace(from_dict(TrainConfig, loaded.config), topology=default_topology(probe_hardware()))
    configure_process()
    return loaded, config


def _guarded(command: Callable[[], None]) -> int:
    try:
        command()
    except FORESEEN as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0
