"""The trainer's whole configuration, as nested frozen dataclasses.

A run is fixed by one TrainConfig. Variants (`trainer.variants`) build one; the command line overrides
single fields with dotted keys (`--set optim.lr=3e-4`). Every dataclass validates itself in
`__post_init__` with the sentence a user needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from trainer.settings import ConfigError as ConfigError  # these names are public here
from trainer.settings import flatten as flatten
from trainer.settings import from_dict as from_dict
from trainer.settings import override as override
from trainer.settings import require as _require
from trainer.settings import to_dict as to_dict

LONGEST_WAIT_S = 366 * 86400.0
"""A deadline beyond it is a slip of the pen, and far beyond it the clock of a lock overflows."""


SHUFFLE_WINDOW = 4096
"""Documents that are shuffled among each other where a corpus is streamed."""
FP8_MULTIPLE = 16
"""What 8-bit products ask of the sizes they sum over and produce (torch 2.11 to 2.13, `_scaled_mm` on CUDA)."""
MOST_REUSE = 100
"""Times that one batch may be trained on: anchors for each are drawn as it is packed, and its states are held."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""`owner/name`, as the Hugging Face hub writes it; a path may look the same, so ask the file system first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    """The frozen target model whose hidden states feed the drafter."""

    path: str = "tiny"
    """`tiny` (the shipped model), a directory with a transformers checkpoint, or `shape:27b` (random weights)."""
    layer_ids: tuple[int, ...] | None = None
    """0-based decoder layers whose outputs are captured; None: by the published rule (`target_layer_ids`)."""
    num_features: int = 5
    """How many layers the rule picks (K)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    allow_slow_kernels: bool = False
    """Run a hybrid target on a GPU without flash-linear-attention's kernels (many times slower)."""
    packing: Literal["auto", "row", "documents"] = "auto"
    """`row`: a packed row is one forward (refused where documents would leak into each other); `documents`: one
    forward each; `auto`: `row` on a GPU where a trial shows no leak, else `documents`. A hybrid whose kernels cannot
    tell documents apart runs `row` with its recurrent mixers document by document."""
    compile: bool | None = None
    """Compile all of a packed row's forward but attention and recurrences, for rows of data.token_budget, padding
    included; needs `row`. 1.4 times as fast as transformers' own forward at the 27B shape, 20 s more at the start.
    None: on a GPU where the trainer knows the model's layers."""
    fp8: bool = False
    """Hold and multiply the decoder's weights in 8 bits (e4m3, one scale for each row). The drafter then trains on
    states that are a few percent off; `trainer bench target --fp8` says how much."""

    def __post_init__(self) -> None:
        _require(self.path.strip() != "", "target.path is empty; give `tiny`, a directory or `shape:27b`")
        _require(
            not self.compile or self.packing != "documents",
            "target.compile needs rows of one length, and target.packing=documents runs every document at its own; set "
            "target.packing=row, or leave target.compile out",
        )
        _require(self.num_features >= 1, "target.num_features must be at least 1")
        if self.layer_ids is not None:
            _require(len(self.layer_ids) > 0, "target.layer_ids is empty; leave it out to use the rule")
            _require(
                list(self.layer_ids) == sorted(set(self.layer_ids)) and self.layer_ids[0] >= 0,
                f"target.layer_ids must be ascending, distinct and >= 0, got {list(self.layer_ids)}",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """Shape of the block-diffusion drafter. Width, vocabulary and rope_theta come from the target."""

    num_layers: int = 5
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 17408
    block_size: int = 16
    mask_token_id: int | None = None
    """A vocabulary row that never occurs in text; None: the target's own reserved row."""
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    sliding_window: int | None = None
    """Window W of the sliding layers, counting the query's own position."""
    sliding_layers: tuple[int, ...] = ()
    """Which drafter layers slide; the others see the whole context of their document."""
    sliding_causal: bool = False
    """In-block causality of the sliding layers; written into every export as `is_causal`."""
    init_from: str | None = None
    """A directory with an exported drafter to start from."""

    def __post_init__(self) -> None:
        _require(self.block_size >= 2, "drafter.block_size must be at least 2: one anchor and one drafted token")
        for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
            _require(getattr(self, name) >= 1, f"drafter.{name} must be at least 1")
        _require(self.rms_norm_eps > 0, "drafter.rms_norm_eps must be positive")
        _require(self.rope_theta is None or self.rope_theta > 0, "drafter.rope_theta must be positive")
        _require((self.mask_token_id or 0) >= 0, "drafter.mask_token_id must be at least 0")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"drafter.num_heads ({self.num_heads}) must be a multiple of drafter.num_kv_heads ({self.num_kv_heads})",
        )
        _require(self.head_dim % 2 == 0, "drafter.head_dim must be even: rotary embedding works on pairs")
        _require(
            not self.sliding_layers or (self.sliding_window or 0) > 0,
            "drafter.sliding_layers needs drafter.sliding_window",
        )
        _require(
            all(0 <= i < self.num_layers for i in self.sliding_layers),
            f"drafter.sliding_layers must lie in 0..{self.num_layers - 1}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where documents come from and how they are packed into fixed shapes."""

    source: str = "stdlib"
    """`stdlib` (the Python standard library's source on this machine) or a file or directory."""
    format: Literal["auto", "text", "jsonl", "arrow", "parquet"] = "auto"
    token_budget: int = 49152
    """Context tokens in one packed row (T)."""
    block_slots: int = 6144
    """Anchors in one packed row (N), filled or padded: a fixed count."""
    max_documents: int = 64
    """Documents in one packed row at most; fixes the length of cu_seqlens."""
    max_document_tokens: int = 4096
    heldout_documents: int = 32
    seed: int = 0
    strict: bool = False
    """A bad line ends the run instead of being counted."""
    streaming: bool = False
    """Read jsonl, arrow and parquet in the order of their files, without an index; shuffled within windows."""
    shuffle_window: int = SHUFFLE_WINDOW
    """Documents of one such window, which are held at once; 1 keeps the order of the files."""
    reuse: int = 1
    """How many times each batch of hidden states is trained on, every time with anchors of its own (k)."""
    reuse_reservoir: int | None = None
    """Batches that each drafter keeps for that; more lie farther apart. None: as few as it takes, k."""

    def __post_init__(self) -> None:
        for name in ("token_budget", "block_slots", "max_documents", "max_document_tokens", "shuffle_window", "reuse"):
            _require(getattr(self, name) >= 1, f"data.{name} must be at least 1")
        _require(self.reuse <= MOST_REUSE, f"data.reuse must be at most {MOST_REUSE}, got {self.reuse}")
        if self.streaming:
            what = "data.source=stdlib" if self.source == "stdlib" else f"data.format={self.format}"
            _require(
                self.source != "stdlib" and self.format != "text",
                f"data.streaming cannot read {what}: it reads rows, and these are whole files that need no index; "
                "give jsonl, arrow or parquet files, or leave data.streaming off",
            )
        else:
            _require(
                self.shuffle_window == SHUFFLE_WINDOW,
                "data.shuffle_window has no effect without data.streaming: a mapped source is shuffled whole; set "
                "data.streaming=true, or leave data.shuffle_window out",
            )
        if self.reuse_reservoir is not None:
            _require(
                self.reuse > 1,
                "data.reuse_reservoir has no effect without data.reuse: set data.reuse=2 or more, or leave it out",
            )
            _require(
                self.reuse_reservoir >= self.reuse,
                f"data.reuse_reservoir must be at least data.reuse ({self.reuse}): with fewer batches the repetitions "
                "of one would follow each other",
            )
        _require(self.source.strip() != "", "data.source is empty; give `stdlib`, a file or a directory")
        _require(self.max_document_tokens >= 2, "data.max_document_tokens must be at least 2: an anchor and its label")
        _require(self.heldout_documents >= 0, "data.heldout_documents must be at least 0")
        _require(
            self.max_document_tokens <= self.token_budget,
            f"data.max_document_tokens ({self.max_document_tokens}) is larger than data.token_budget "
            f"({self.token_budget}): such a document could never be packed",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Decayed cross-entropy: w_k = exp(-(k-1)/gamma) for block position k >= 1."""

    gamma: float | None = None
    """None: 7 for block 16, 5 for 10, 4 for 8 (paper appendix). Of no effect with weighting=dpace."""
    labels: Literal["tokens", "argmax", "kl"] = "tokens"
    weighting: Literal["decay", "dpace"] = "decay"
    dpace_smoothing: float = 0.5
    chunk_rows: int = 4096
    """Rows of logits held at once."""

    def __post_init__(self) -> None:
        _require(self.gamma is None or self.gamma > 0, "loss.gamma must be positive")
        _require(0 <= self.dpace_smoothing <= 1, "loss.dpace_smoothing must lie in [0, 1]")
        _require(self.chunk_rows >= 1, "loss.chunk_rows must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW on fp32 master weights, linear warm-up, cosine to lr * min_lr_ratio, clipped by global norm."""

    lr: float = 6e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_ratio: float = 0.04
    min_lr_ratio: float = 0.0
    clip: float = 1.0
    micro_steps: int = 1
    """Batches each drafter accumulates before one optimizer step."""

    def __post_init__(self) -> None:
        _require(self.lr > 0, "optim.lr must be positive")
        _require(all(0 <= beta < 1 for beta in self.betas), "optim.betas must lie in [0, 1)")
        _require(self.eps > 0, "optim.eps must be positive")
        _require(self.weight_decay >= 0, "optim.weight_decay must be at least 0")
        _require(0 <= self.min_lr_ratio <= 1, "optim.min_lr_ratio must lie in [0, 1]")
        _require(0 <= self.warmup_ratio < 1, "optim.warmup_ratio must lie in [0, 1)")
        _require(self.clip > 0, "optim.clip must be positive")
        _require(self.micro_steps >= 1, "optim.micro_steps must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """How the drafter's training step is executed; nothing here changes what a checkpoint or an export holds."""

    fp8: bool = False
    """The drafter's matrix products and the frozen head in 8 bits (e4m3, one scale a row), forward and backward."""
    recompute: Literal["auto", "none", "elementwise"] = "auto"
    """What a compiled backward computes again to hold less: `elementwise`, norms and rotations, but no product.

    `auto` is that wherever the step is compiled: a tenth of its memory for half a percent of its time.
    """
    recompute_mlps: int = 0
    """In how many layers, from the first, backward also repeats the gate and up product: memory for FLOPs."""

    def __post_init__(self) -> None:
        _require(self.recompute_mlps >= 0, "step.recompute_mlps must be at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologyConfig:
    """Devices of each role, as `cpu` or `cuda:N`; a device may appear in several roles and several times."""

    target: tuple[str, ...] = ("cpu",)
    drafter: tuple[str, ...] = ("cpu", "cpu")
    verifier: tuple[str, ...] = ("cpu",)

    def __post_init__(self) -> None:
        _require(len(self.target) >= 1, "topology.target needs at least one device")
        _require(len(self.drafter) >= 1, "topology.drafter needs at least one device")

    @property
    def evaluating(self) -> tuple[str, ...]:
        """Devices of the verifiers; where none is named, the first target's is one."""
        return self.verifier or self.target[:1]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How long to run, and what to say and save on the way."""

    max_steps: int = 10000
    log_every: int = 10
    eval_every: int = 200
    checkpoint_every: int = 500
    keep_last: int = 2
    queue_depth: int = 2
    """Batches waiting in each channel at most."""
    gate_deadline_s: float = 1800.0
    """Seconds one thread's warm-up may take before the process dumps all stacks and exits."""
    stop_deadline_s: float = 25.0
    """Seconds from TERM or HUP to the end."""
    stall_deadline_s: float = 900.0
    """Seconds any stage may wait for another in steady state before the run ends with an error."""
    eval_deadline_s: float = 600.0
    """Seconds the last evaluation may take after the last step."""
    decode_prompts: int = 8
    """Held-out prompts that are truly decoded, drafter and target together; 0: none. After the last step, and at every
    evaluation where the verifier has a device of its own; a little of it as the verifier warms up."""
    decode_tokens: int = 64
    """New tokens for each of them."""
    exchange: Literal["auto", "nccl", "peer"] = "auto"
    """How drafters on several GPUs add up gradients; `auto`: NCCL where they have these GPUs to themselves, else peer
    copies. `nccl` is refused elsewhere, the others have no effect there."""
    tensorboard: bool = True
    """Write the same numbers for TensorBoard, where it is installed."""
    seed: int = 0
    resume: str | None = None
    """A checkpoint directory, or `auto`: the newest intact one of the run directory."""

    def __post_init__(self) -> None:
        for name in ("max_steps", "log_every", "eval_every", "checkpoint_every", "keep_last", "queue_depth"):
            _require(getattr(self, name) >= 1, f"run.{name} must be at least 1")
        _require(self.decode_prompts >= 0, "run.decode_prompts must be at least 0")
        _require(self.decode_tokens >= 2, "run.decode_tokens must be at least 2")
        for name in ("gate_deadline_s", "stop_deadline_s", "stall_deadline_s", "eval_deadline_s"):
            _require(0 < getattr(self, name) <= LONGEST_WAIT_S, f"run.{name} must be positive and at most a year")
        _require(0 <= self.seed < 2**63, "run.seed must lie in 0 .. 2**63 - 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """One run, whole."""

    variant: str
    attention: Literal["flex", "sdpa"] = "flex"
    graphs: Literal["step", "compiler", "none"] = "none"
    """`step`: whole-step CUDA graph on the drafter's own thread; `compiler`: reduce-overhead; `none`."""
    compile: bool = True
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    step: StepConfig = field(default_factory=StepConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        drafter = self.drafter
        _require(
            self.step.recompute_mlps <= drafter.num_layers,
            f"step.recompute_mlps is {self.step.recompute_mlps}, but the drafter has {drafter.num_layers} layers",
        )
        sizes = {
            "drafter.num_heads * head_dim": drafter.num_heads * drafter.head_dim,
            "drafter.num_kv_heads * head_dim": drafter.num_kv_heads * drafter.head_dim,
            "drafter.intermediate_size": drafter.intermediate_size,
            "data.token_budget": self.data.token_budget,
            "data.block_slots * drafter.block_size": self.data.block_slots * drafter.block_size,
        }
        bad = [f"{name} is {size}" for name, size in sizes.items() if size % FP8_MULTIPLE]
        _require(
            not self.step.fp8 or not bad,
            f"step.fp8 needs multiples of {FP8_MULTIPLE}: {', '.join(bad)}; change them or leave it off",
        )

    @property
    def elementwise_again(self) -> bool:
        """Whether a GPU's backward makes again what `step.recompute` says; `auto` does where the step is compiled."""
        return self.step.recompute == "elementwise" or (self.step.recompute == "auto" and self.step_compiled)

    @property
    def step_compiled(self) -> bool:
        """Whether a GPU's drafter is compiled: its SDPA form, which exists to be compared with, never is."""
        return self.compile and self.attention == "flex"
