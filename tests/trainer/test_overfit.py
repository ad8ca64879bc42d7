"""A real run that may learn one text by heart: loss near zero, whole blocks accepted."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from small_run import events, run_small, small_config

from trainer.config import TargetConfig
from trainer.decode import greedy_decode
from trainer.model.target_loading import load_target


def test_a_run_learns_one_text_by_heart(tmp_path: Path) -> None:
    """Four copies of the target's own greedy text, one of them held out: the run's own measures must say so.

    Fails with labels shifted by one, and with anchors that training sees and drafting does not.
    """
    target = load_target(TargetConfig(path="tiny", num_features=3, dtype="float32"), "cpu")
    prompt = torch.tensor(target.tokenizer(Path(__file__).read_text()[:60])["input_ids"])
    ids = [*prompt.tolist(), *greedy_decode(target, prompt, max_new_tokens=90)]
    mask = [place >= len(prompt) for place in range(len(ids))]
    row = json.dumps({"input_ids": ids, "loss_mask": mask})
    (tmp_path / "text.jsonl").write_text(f"{row}\n" * 4)
    config = small_config(
        {
            "data.source": str(tmp_path / "text.jsonl"),
            "data.max_document_tokens": "160",
            "data.token_budget": "160",
            "data.block_slots": "48",
            "data.heldout_documents": "1",
            "drafter.num_layers": "2",
            "drafter.sliding_layers": "[]",
            "drafter.num_heads": "4",
            "drafter.num_kv_heads": "2",
            "drafter.intermediate_size": "256",
            "topology.drafter": "cpu",
            "optim.lr": "3e-3",
            "run.max_steps": "60",
            "run.eval_every": "60",
            "run.checkpoint_every": "60",
            "run.log_every": "20",
            "run.decode_tokens": "32",
        }
    )
    code, _ = run_small(config, tmp_path / "run")
    assert code == 0
    steps, evaluations = (events(tmp_path / "run", kind) for kind in ("step", "eval"))
    assert steps[0]["loss"] > 3
    assert steps[-1]["loss"] < 0.05
    assert steps[-1]["accuracy"] > 0.99
    assert evaluations[0]["accept_len"] < 1.5
    assert evaluations[-1]["accept_len"] > 0.95 * config.drafter.block_size
    assert evaluations[-1]["decode_accept_len"] > 0.9 * config.drafter.block_size
