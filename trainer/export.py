"""A trained drafter in the two published forms, tested as it is written; and back.

    zlab         what SGLang, vLLM (`method: dflash`) and z-lab's loader read: the drafter's own weights
    speculators  what vLLM reads through the speculators library: the same body with embedding and head

A loader that meets a key it does not know leaves a layer random and says nothing, so nothing is published
here before it was read back: keys, shapes, configuration, and outputs on a stored batch.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trainer.config import ConfigError, DrafterConfig
from trainer.export_forms import Provenance, read_config, speculators_config, zlab_config
from trainer.model.drafter import Drafter, DrafterShape
from trainer.model.mask import attend_sdpa

Format = Literal["zlab", "speculators"]
WEIGHTS, CONFIG = "model.safetensors", "config.json"


class ExportError(Exception):
    """An export that cannot be written or read; the message says what, why and what to do."""


@dataclass(frozen=True, slots=True)
class LoadedExport:
    """An export read back."""

    shape: DrafterShape
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    weights: dict[str, torch.Tensor]
    """The drafter's own, under the published keys."""


def export(
    weights: dict[str, torch.Tensor],
    shape: DrafterShape,
    provenance: Provenance,
    out: Path,
    form: Format,
    *,
    embed_VH: torch.Tensor | None = None,
    head_VH: torch.Tensor | None = None,
) -> Path:
    """Write one form in bf16 and read it back; `out` appears whole or not at all.

    The speculators form also carries the target's embedding and head. Raises ExportError.
    """
    if out.exists():
        raise ExportError(f"{out} exists already; choose another directory or remove it")
    tensors = {key: value.detach().to("cpu", torch.bfloat16).contiguous() for key, value in weights.items()}
    own = dict(tensors)
    if form == "zlab":
        config = zlab_config(shape, provenance)
    else:
        if embed_VH is None or head_VH is None:
            raise ExportError("the speculators form carries the target's embedding and head; give both")
        config = speculators_config(shape, provenance)
        # clone: a target with tied embeddings shares them, which the file format refuses
        tensors["embed_tokens.weight"] = embed_VH.detach().to("cpu", torch.bfloat16).clone()
        tensors["lm_head.weight"] = head_VH.detach().to("cpu", torch.bfloat16).clone()
    partial = out.with_name(f".partial-{out.name}-{os.getpid()}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        self_test(partial, own, shape, provenance)
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"cannot write {out}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def load_export(directory: Path) -> LoadedExport:
    """Read either form. Raises ExportError on anything missing, unknown or of the wrong shape."""
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(directory / WEIGHTS)
        shape, layer_ids, mask_token_id = read_config(config, tensors["fc.weight"].shape[1])
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise ExportError(f"{directory} is no exported drafter: {error}") from error
    except (KeyError, TypeError, ConfigError) as error:
        raise ExportError(f"{directory / CONFIG} misses or misstates {error}") from error
    weights = {k: v for k, v in tensors.items() if k not in ("embed_tokens.weight", "lm_head.weight", "t2d", "d2t")}
    expected = {key: tuple(value.shape) for key, value in Drafter.empty(shape, "meta").state_dict().items()}
    found = {key: tuple(value.shape) for key, value in weights.items()}
    if expected != found:
        wrong = sorted(expected.items() ^ found.items())
        raise ExportError(
            f"{directory / WEIGHTS} does not hold the drafter that its config.json describes; differing: "
            + ", ".join(f"{key} {list(size)}" for key, size in wrong[:6])
        )
    return LoadedExport(shape, layer_ids, mask_token_id, weights)


def initialise(drafter: Drafter, directory: Path, target_layer_ids: tuple[int, ...]) -> None:
    """Start a drafter from an export (`drafter.init_from`). Raises ExportError when it is another drafter."""
    loaded = load_export(directory)
    ours, theirs = drafter.shape, loaded.shape
    # What may differ: where it came from, and which row MASK is (checked below).
    ours = replace(ours, config=replace(ours.config, init_from=None, mask_token_id=None, rope_theta=None))
    theirs = replace(theirs, config=replace(theirs.config, mask_token_id=None))
    differing = [f"{n}: {v}" for n, v in _differences(theirs, ours)]
    if loaded.target_layer_ids != target_layer_ids:
        differing.append(f"target layers: {list(loaded.target_layer_ids)} in the export, {list(target_layer_ids)} here")
    mask = drafter.shape.config.mask_token_id
    if mask is not None and mask != loaded.mask_token_id:
        differing.append(f"MASK token: {loaded.mask_token_id} in the export, {mask} here")
    if differing:
        raise ExportError(
            f"drafter.init_from {directory} is not the drafter of this run; change the settings or leave it out:\n  "
            + "\n  ".join(differing)
        )
    drafter.load_state_dict(loaded.weights, strict=True)


def _differences(theirs: DrafterShape, ours: DrafterShape) -> list[tuple[str, str]]:
    rows = []
    for name in ("hidden_size", "vocab_size", "num_features", "rope_theta"):
        rows.append((name, getattr(theirs, name), getattr(ours, name)))
    for name in DrafterConfig.__dataclass_fields__:
        rows.append((name, getattr(theirs.config, name), getattr(ours.config, name)))
    # Causality and window mean nothing where no layer slides.
    unused = set() if ours.config.sliding_layers else {"sliding_window", "sliding_causal"}
    return [(n, f"{a} in the export, {b} here") for n, a, b in rows if a != b and n not in unused]


def self_test(directory: Path, weights: dict[str, torch.Tensor], shape: DrafterShape, provenance: Provenance) -> None:
    """Read an export back and compare everything, outputs on a fixed batch included. Raises ExportError."""
    loaded = load_export(directory)
    problems = [f"{n}: {v}" for n, v in _differences(loaded.shape, _plain(shape, provenance))]
    if loaded.target_layer_ids != provenance.target_layer_ids:
        problems.append(f"target layers read back as {loaded.target_layer_ids}")
    problems += [f"{k} changed" for k, v in weights.items() if not torch.equal(loaded.weights[k], v)]
    problems += [f"{k} is not finite" for k, v in weights.items() if not bool(v.isfinite().all())]
    if not problems and not torch.equal(_probe(weights, shape), _probe(loaded.weights, loaded.shape)):
        problems.append("outputs differ on the test batch")
    if problems:
        raise ExportError("the export does not read back as it was written: " + "; ".join(problems[:6]))


def _plain(shape: DrafterShape, provenance: Provenance) -> DrafterShape:
    config = replace(shape.config, init_from=None, rope_theta=None, mask_token_id=provenance.mask_token_id)
    return replace(shape, config=config)


@torch.no_grad()
def _probe(weights: dict[str, torch.Tensor], shape: DrafterShape) -> torch.Tensor:
    """Outputs on a fixed small batch of two documents, in the weights' own type."""
    generator = torch.Generator().manual_seed(11)
    drafter = Drafter.empty(shape, "cpu", next(iter(weights.values())).dtype)
    drafter.load_state_dict(weights, strict=True)
    block = shape.block_size
    doc_ids_T = torch.tensor([0] * 24 + [1] * 16, dtype=torch.int32)
    positions_T = torch.cat((torch.arange(24), torch.arange(16)))
    anchors_N = torch.tensor([0, 9, 23, 30], dtype=torch.int32)
    dtype = next(drafter.parameters()).dtype
    hidden_TKH = torch.randn(40, shape.num_features * shape.hidden_size, generator=generator).to(dtype)
    embeds_QH = torch.randn(4 * block, shape.hidden_size, generator=generator).to(dtype)
    at_Q = (positions_T[anchors_N.long()][:, None] + torch.arange(block)).flatten()
    attend = attend_sdpa(anchors_N, torch.ones(4, dtype=torch.bool), doc_ids_T, shape)
    out: torch.Tensor = drafter(hidden_TKH, positions_T, embeds_QH, at_Q, attend)
    return out
