"""Make the tiny target: a Qwen3.5-style hybrid trained from scratch on the standard library's source.

    python scripts/make_tiny_target.py --out trainer/assets/tiny --max-seconds 200
    python scripts/make_tiny_target.py --out trainer/assets/tiny --init-from trainer/assets/tiny --max-seconds 1200

The vocabulary is the 256 bytes and four reserved rows. Sub-words would be shorter to read but need far more
examples before a drafter gets two in a row right: with 512 sub-words a table of successors accepts 1.2 tokens a
round on this corpus, with bytes 2.7, and the demonstration has three minutes.

Writes config.json, model.safetensors (bf16), the tokenizer and training.json (how it was made). Nothing
is downloaded: the corpus is the standard library of the Python that runs this. The
learning rate follows whichever of --steps and --max-seconds is further along, so that a run cut by time
still ends its schedule.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from trainer.data.sources import stdlib_files

END, MASK, TURN_START, TURN_END = "<|endoftext|>", "<|mask|>", "<|im_start|>", "<|im_end|>"
VOCAB = 264
HELDOUT_EVERY = 50  # every 50th file measures the loss and is not trained on

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def read_corpus() -> tuple[list[str], list[str]]:
    """Training and held-out texts."""
    train: list[str] = []
    heldout: list[str] = []
    for number, path in enumerate(stdlib_files()):
        text = path.read_text(encoding="utf-8", errors="replace")
        (heldout if number % HELDOUT_EVERY == 0 else train).append(text)
    return train, heldout


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: any text encodes, and the four reserved rows never come out of plain text."""
    rows = [END, MASK, TURN_START, TURN_END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={row: number for number, row in enumerate(rows)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([END, MASK, TURN_START, TURN_END])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=END,
        pad_token=END,
        mask_token=MASK,
        additional_special_tokens=[TURN_START, TURN_END],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5TextConfig:
    """Eight layers, three GatedDeltaNet to one full attention, as in the published hybrids."""
    return Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )


def warm_start(model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> list[object]:
    """Take over an earlier model's weights, vocabulary rows by their text; returns how that one was made."""
    old = Qwen3_5ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    old_rows = AutoTokenizer.from_pretrained(directory).get_vocab()
    weights = old.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        fresh = model.state_dict()[name].clone()
        for text, row in tokenizer.get_vocab().items():
            if text in old_rows:
                fresh[row] = weights[name][old_rows[text]]
        weights[name] = fresh
    model.load_state_dict(weights)
    return [json.loads((directory / "training.json").read_text(encoding="utf-8"))]


def token_stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All texts one after another, each closed by the end token."""
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    return torch.tensor([token for ids in encoded for token in (*ids, end)], dtype=torch.int64)


def windows(stream: torch.Tensor, length: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` random windows [count, length + 1]."""
    starts = torch.randint(0, stream.numel() - length - 1, (count, 1), generator=generator)
    return stream[starts + torch.arange(length + 1)]


@torch.no_grad()
def measure(model: Qwen3_5ForCausalLM, stream: torch.Tensor, length: int, device: torch.device) -> tuple[float, float]:
    """Held-out loss and next-token accuracy over evenly spaced windows."""
    count = min(64, (stream.numel() - 1) // length)
    rows = stream[: count * length + 1].unfold(0, length + 1, length).to(device)
    losses, hits, tokens = 0.0, 0, 0
    for row in rows.split(16):
        logits = model(row[:, :-1], use_cache=False).logits.float()
        labels = row[:, 1:]
        losses += torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
        hits += int((logits.argmax(-1) == labels).sum())
        tokens += labels.numel()
    return losses / tokens, hits / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--max-seconds", type=float, default=200.0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--init-from", type=Path, help="an earlier tiny target, whose vocabulary may differ")
    parser.add_argument("--seed", type=int, default=20261129)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    device = torch.device(args.device)
    train_texts, heldout_texts = read_corpus()
    tokenizer = make_tokenizer()
    train, heldout = token_stream(tokenizer, train_texts), token_stream(tokenizer, heldout_texts)
    model = Qwen3_5ForCausalLM(make_config(tokenizer))
    history = warm_start(model, tokenizer, args.init_from) if args.init_from else []
    model = model.to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{train.numel():,} training tokens, {heldout.numel():,} held out, {parameters:,} parameters", flush=True)

    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    started = time.monotonic()
    step, progress, loss_value = 0, 0.0, float("nan")
    while progress < 1.0:
        lr = args.lr * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        batch = windows(train, args.length, args.batch, generator).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 0:
            loss_value = loss.item()
            print(f"step {step} loss {loss_value:.4f} lr {lr:.2e} {time.monotonic() - started:.0f} s", flush=True)
        progress = max(step / args.steps, (time.monotonic() - started) / args.max_seconds)

    model = model.to(torch.bfloat16).eval()
    heldout_loss, heldout_accuracy = measure(model, heldout, args.length, device)
    print(f"held out: loss {heldout_loss:.4f} accuracy {heldout_accuracy:.3f}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    model.cpu().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    record = {
        "script": "scripts/make_tiny_target.py",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "arguments": {k: str(v) for k, v in vars(args).items() if k not in ("out", "init_from")},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "corpus": "standard library source without its tests",
        "training_tokens": train.numel(),
        "parameters": parameters,
        "steps": step,
        "tokens_seen": step * args.batch * args.length,
        "last_train_loss": round(loss_value, 4),
        "heldout_loss": round(heldout_loss, 4),
        "heldout_next_token_accuracy": round(heldout_accuracy, 4),
        "started_from": history,
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
