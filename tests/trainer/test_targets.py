"""Captured states against transformers' own, packed rows against documents alone, and refusals."""

from __future__ import annotations

import itertools
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.config import DrafterConfig, TargetConfig
from trainer.data.packing import Document, pack
from trainer.model import target_layers
from trainer.model.gated_delta import RowBounds
from trainer.model.target_layers import TrunkLayer
from trainer.model.target_loading import load_target, target_layer_ids
from trainer.model.target_models import TINY, TargetError
from trainer.model.target_packing import packing_leak
from trainer.model.targets import Target, WithFinalStates


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TargetConfig(dtype="float32"), "cpu")


def document(target: Target, text: str) -> Document:
    ids = torch.tensor(target.tokenizer(text)["input_ids"])
    return Document(text[:10], ids, torch.ones(ids.shape[0], dtype=torch.bool))


TEXTS = (
    "import os\n\nfor name in os.listdir('.'):\n    print(name)\n",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n" * 3,
    "x = 1\n",
)


@pytest.mark.parametrize(
    ("layers", "ids"),
    [
        (28, (1, 7, 13, 19, 25)),
        (32, (1, 8, 15, 22, 29)),
        (36, (1, 9, 17, 25, 33)),
        (40, (1, 10, 19, 28, 37)),
        (64, (1, 16, 31, 46, 61)),
    ],
)
def test_published_layer_ids(layers: int, ids: tuple[int, ...]) -> None:
    assert target_layer_ids(layers, 5) == ids
    assert target_layer_ids(layers, 1) == (layers // 2,)


def test_too_few_layers_for_the_rule_is_refused() -> None:
    with pytest.raises(TargetError, match="4 layers"):
        target_layer_ids(4, 5)


def test_states_are_the_outputs_of_the_chosen_layers(target: Target) -> None:
    """Failed with `hidden_states[id]`: the off-by-one that caps acceptance."""
    ids = document(target, TEXTS[1]).input_ids
    theirs = target.model(ids[None], output_hidden_states=True, use_cache=False).hidden_states
    ours = target.document_states(ids)
    assert ours.shape == (ids.shape[0], 5 * target.hidden_size)
    for place, layer in enumerate(target.layer_ids):
        part = ours[:, place * target.hidden_size : (place + 1) * target.hidden_size]
        assert torch.allclose(part, theirs[layer + 1][0], atol=1e-5)
        assert not torch.allclose(part, theirs[layer][0], atol=1e-2)
    assert ours.isfinite().all()
    assert (ours.abs().sum(1) > 0).all()


def test_the_forward_stops_after_the_last_captured_layer(target: Target) -> None:
    ran: list[int] = []
    hooks = [
        layer.register_forward_hook(lambda *_, n=n: ran.append(n)) for n, layer in enumerate(target.model.model.layers)
    ]
    target.document_states(torch.tensor([5, 6, 7]))
    for hook in hooks:
        hook.remove()
    assert ran == list(range(target.layer_ids[-1] + 1))
    assert target.num_layers > len(ran)


def test_a_packed_row_equals_its_documents_alone(target: Target) -> None:
    """Failed when the row ran as one sequence: GatedDeltaNet's state then crosses every boundary."""
    documents = [document(target, text) for text in TEXTS]
    budget = sum(map(len, documents)) + 9
    row = pack(documents, index=0, cursor={}, token_budget=budget, block_slots=4, max_documents=5, run_seed=0)
    states = target.hidden_states(row)
    start = 0
    for each in documents:
        alone = target.document_states(each.input_ids)
        assert torch.allclose(states[start : start + len(each)], alone, atol=1e-6)
        start += len(each)
    assert not states[start:].any()
    reused = torch.full_like(states, float("nan"))
    assert torch.equal(target.hidden_states(row, out=reused), states)


def test_two_threads_do_not_mix_their_captures(target: Target) -> None:
    ids = [document(target, text).input_ids for text in TEXTS[:2]]
    alone = [target.document_states(i) for i in ids]
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(5):
            if not torch.equal(target.document_states(ids[n]), alone[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong


def test_the_tiny_target_is_small_hybrid_and_predicts_python(target: Target) -> None:
    assert (TINY / "model.safetensors").stat().st_size < 8 * 2**20
    config = json.loads((TINY / "config.json").read_text())
    kinds = config["layer_types"]
    assert kinds.count("linear_attention") == 3 * kinds.count("full_attention")
    ids = document(target, Path(threading.__file__).read_text()[:1500]).input_ids
    logits = target.model(ids[None], use_cache=False).logits[0]
    assert float((logits[:-1].argmax(-1) == ids[1:]).float().mean()) > 0.4


def test_the_mask_token_never_comes_out_of_text(target: Target) -> None:
    assert target.mask_token(DrafterConfig()) == target.tokenizer.mask_token_id
    for text in (*TEXTS, "mask <mask> [MASK] \u2603", bytes(range(256)).decode("latin-1")):
        assert target.mask_token_id not in target.tokenizer(text)["input_ids"]


@pytest.mark.parametrize("token", [264, 512, 0])
def test_a_mask_token_outside_the_vocabulary_or_that_ends_text_is_refused(target: Target, token: int) -> None:
    with pytest.raises(TargetError, match=r"drafter\.mask_token_id"):
        target.mask_token(DrafterConfig(mask_token_id=token))


def test_a_vocabulary_without_a_known_mask_token_asks_for_one(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "mask_token_id", None)
    with pytest.raises(TargetError, match=r"set drafter\.mask_token_id"):
        target.mask_token(DrafterConfig())
    assert target.mask_token(DrafterConfig(mask_token_id=9)) == 9


def test_drafter_shape_follows_the_target(target: Target) -> None:
    shape = target.drafter_shape(DrafterConfig())
    assert (shape.hidden_size, shape.vocab_size, shape.num_features) == (128, 264, 5)
    assert shape.rope_theta == target.rope_theta == 10000.0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (TargetConfig(path="/nowhere/at/all"), "no config.json"),
        (TargetConfig(path="owner/name"), "hf download owner/name --local-dir DIR"),
        (TargetConfig(path="shape:9000b"), "shape:27b"),
        (TargetConfig(layer_ids=(1, 8)), "layers 0 to 7"),
    ],
)
def test_a_target_that_cannot_be_used_says_why(config: TargetConfig, words: str) -> None:
    with pytest.raises(TargetError, match=words):
        load_target(config, "cpu")


def test_a_corrupt_checkpoint_says_so(tmp_path: Path) -> None:
    for file in TINY.iterdir():
        (tmp_path / file.name).write_bytes(
            file.read_bytes()[:1000] if file.suffix == ".safetensors" else file.read_bytes()
        )
    with pytest.raises(TargetError, match="does not load"):
        load_target(TargetConfig(path=str(tmp_path)), "cpu")


def other_target(kind: str, directory: Path, **sizes: int) -> Path:
    """A small random text model of another family, with the tiny tokenizer; `sizes` replace those of its config."""
    import transformers

    common = {
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 0,
    } | sizes
    if kind == "gemma3":
        config = transformers.Gemma3TextConfig(**common, sliding_window=16, query_pre_attn_scalar=8)
    elif kind == "qwen3":
        config = transformers.Qwen3Config(**common, tie_word_embeddings=True)
    elif kind == "granite":
        scales = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 1 / 64}
        config = transformers.GraniteConfig(**common, **scales)
    else:
        kinds = {"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral", "smollm3": "SmolLM3"}
        config = getattr(transformers, f"{kinds[kind]}Config")(**common)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:  # loud enough that a leak shows
            torch.nn.init.normal_(parameter, std=0.2 if "embed" in name else 0.15)
    model.save_pretrained(directory)
    for file in TINY.glob("tok*"):
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3"])
def test_other_families_in_one_forward_over_the_row(kind: str, tmp_path: Path) -> None:
    """Captured states and packing of Qwen3, Llama and Gemma 3 (whose sliding window is shorter than a document).

    Failed when the bounds were not set around the forward, and when the window was dropped.
    """
    path = other_target(kind, tmp_path)
    target = load_target(TargetConfig(path=str(path), dtype="float32", num_features=3, packing="row"), "cpu")
    assert target.packing == "row"
    documents = [document(target, text) for text in TEXTS]
    row = pack(documents, index=0, cursor={}, token_budget=400, block_slots=4, max_documents=5, run_seed=0)
    states = target.hidden_states(row)
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    start = 0
    for each in documents:
        full = theirs.eval()(each.input_ids[None], output_hidden_states=True, use_cache=False).hidden_states
        expected = torch.cat([full[layer + 1][0] for layer in target.layer_ids], dim=-1)
        assert torch.allclose(states[start : start + len(each)], expected, atol=1e-4, rtol=1e-4)
        start += len(each)
    embed = target.embed_VH[documents[0].input_ids]
    assert torch.allclose(embed, theirs.get_input_embeddings()(documents[0].input_ids), atol=1e-5)
    assert torch.equal(target.head_VH, theirs.get_output_embeddings().weight)
    assert target.rope_theta == (1e6 if kind == "gemma3" else 1e4)


def test_a_hybrid_whose_kernels_leak_runs_its_recurrent_layers_by_document(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left alone it runs document by document; asked for rows, only its recurrent mixers do, or it is refused.

    A hybrid whose GatedDeltaNet modules are of another make than the known one: that one keeps documents apart.
    The refusal failed without the second trial: `row` was then believed.
    """
    monkeypatch.setattr(target_layers, "unknown_recurrence", lambda mixer: "another make")
    assert packing_leak(target) is not None
    assert target.packing == "documents"
    asked = load_target(TargetConfig(dtype="float32", packing="row"), "cpu")
    assert asked.packing == "row"
    assert asked.apart is not None
    assert asked.apart.by_document
    assert packing_leak(asked) is None
    documents = [document(target, text) for text in TEXTS]
    row = pack(documents, index=0, cursor={}, token_budget=400, block_slots=4, max_documents=5, run_seed=0)
    assert torch.allclose(asked.hidden_states(row), target.hidden_states(row), atol=1e-5)
    assert torch.allclose(asked.hidden_states(row, final=True), target.hidden_states(row, final=True), atol=1e-4)
    monkeypatch.setattr(TrunkLayer, "run_by_document", lambda self: None)
    with pytest.raises(TargetError, match="does not keep packed documents apart"):
        load_target(TargetConfig(dtype="float32", packing="row"), "cpu")


def test_a_leak_is_seen(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial itself: one forward that ignores the bounds differs, one that keeps them does not."""

    def leaking(ids: torch.Tensor, positions: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        return target.document_states(ids)

    def exact(ids: torch.Tensor, positions: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        return torch.cat([target.document_states(ids[a:b]) for a, b in itertools.pairwise(bounds)])

    monkeypatch.setattr(target, "row_states", leaking)
    assert "from the documents alone" in str(packing_leak(target))
    monkeypatch.setattr(target, "row_states", exact)
    assert packing_leak(target) is None


@pytest.mark.parametrize("what", ["place_T", "bounds"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "8 bits"])
def test_a_small_leak_is_seen_through_rounding(what: str, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leak of the convolution's taps alone, or of the recurrent state alone, where states round coarsely.

    Without a leak such a target passes: it did not when rounding alone, 6 % in a token, was taken for a leak. The leak
    of the state was not seen without the second row.
    """
    rounded = load_target(TargetConfig(dtype="bfloat16", packing="row", fp8=fp8), "cpu")
    assert rounded.apart is not None
    assert rounded.apart.own_recurrence
    made = RowBounds.of

    def leaking(bounds: list[int], upload: Any) -> RowBounds:
        wrong = {"place_T": torch.arange(bounds[-1], dtype=torch.int32), "bounds": [0, bounds[-1]]}
        return replace(made(bounds, upload), **{what: wrong[what]})

    monkeypatch.setattr(RowBounds, "of", leaking)
    assert "differ by" in str(packing_leak(rounded))


def test_rounding_that_has_grown_over_many_layers_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """8-bit states of 62 random layers are off by 78 %. Failed when every captured layer was compared."""
    deep = load_target(TargetConfig(dtype="bfloat16", packing="row", fp8=True), "cpu")
    honest, width = Target.document_states, deep.hidden_size
    generator = torch.Generator().manual_seed(0)

    def grown(self: Target, ids: torch.Tensor) -> torch.Tensor:
        states = honest(self, ids)
        states[:, width:] += torch.randn(states[:, width:].shape, generator=generator) * states[:, width:].std()
        return states

    monkeypatch.setattr(Target, "document_states", grown)
    assert packing_leak(deep) is None


def test_states_that_are_not_finite_are_refused() -> None:
    broken = load_target(TargetConfig(dtype="float32"), "cpu")
    broken.model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    row = pack(
        [document(broken, TEXTS[2])], index=3, cursor={}, token_budget=9, block_slots=1, max_documents=1, run_seed=0
    )
    with pytest.raises(TargetError, match="not finite in batch 3"):
        broken.hidden_states(row)


def test_final_states_give_the_targets_own_next_tokens(target: Target) -> None:
    documents = [document(target, text) for text in TEXTS]
    row = pack(documents, index=0, cursor={}, token_budget=400, block_slots=4, max_documents=5, run_seed=0)
    states = target.hidden_states(row, final=True)
    final = states[:, -target.hidden_size :]
    assert torch.equal(states[:, : -target.hidden_size], target.hidden_states(row))
    assert torch.equal(WithFinalStates(target).hidden_states(row), states)
    start = 0
    for each in documents:
        logits = target.model(each.input_ids[None], use_cache=False).logits[0]
        assert torch.allclose(final[start : start + len(each)] @ target.head_VH.T, logits, atol=1e-4)
        start += len(each)
    assert not final[start:].any()
