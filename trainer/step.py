"""One drafter's training step over persistent buffers: load, accumulate, (exchange), apply.

The host never waits for the device in a step; `metrics()` is the only place that reads a number back. Every buffer
keeps its address for the life of the process, so on a GPU `accumulate` and `apply` are each captured once as a CUDA
graph and replayed, on this drafter's own thread, stream and memory pool. The gradient exchange runs between the two.

    accumulate: block tables -> drafter forward -> loss numerator -> backward, into one flat gradient buffer
    apply:      divide by the global denominator, clip, AdamW on fp32 master weights, clear gradients and sums

Shape legend: T context tokens, N block slots, B block size, Q = N * B, K captured layers, H hidden size, V vocabulary,
P flat parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer import torch_setup
from trainer.config import ConfigError, TrainConfig
from trainer.data.batch import HiddenBatch
from trainer.graphs import CapturedStep, compiled, recomputing
from trainer.inputs import StepInputs
from trainer.model import fp8
from trainer.model.anchors import labels_and_weights, predicting_rows
from trainer.model.attention import layer_layouts, make_attention
from trainer.model.drafter import Attend, Drafter, Product
from trainer.model.head import Head, PlainHead, ScaledHead
from trainer.model.loss import Teacher, accept_lengths, block_loss, dpace, teacher_choices
from trainer.model.rotary import Ropes
from trainer.optim import FlatAdamW, flatten_parameters
from trainer.step_checks import check_options

STATS = ("numerator", "denominator", "correct", "counted", "accept_sum", "blocks", "tokens")
"""What `TrainStep.stats` sums, in this order; each may be added over micro-steps and drafters."""


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """What the drafter borrows from the frozen target; copied to the drafter's device if they lie elsewhere."""

    embed_VH: torch.Tensor
    head_VH: torch.Tensor
    mask_token_id: int


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The last applied step, over all drafters and micro-steps that took part in it."""

    step: int
    """Optimizer updates so far."""
    loss: float
    accuracy: float
    accept_len: float
    """Mean over blocks of 1 + the leading drafted tokens that are right."""
    blocks: int
    tokens: int
    """Context tokens."""
    lr: float
    grad_norm: float
    updated: bool
    """False if nothing carried weight or the gradient was not finite: the weights stayed as they were."""


def drafter_forward(
    drafter: Drafter,
    hidden_TKH: torch.Tensor,
    ropes: Ropes,
    anchor_embeds_NH: torch.Tensor,
    mask_embed_H: torch.Tensor,
    attend: Attend,
    product: Product = torch.nn.functional.linear,
    recompute_mlps: int = 0,
    recompute_attended: bool = False,
) -> torch.Tensor:
    """The compiled region: the whole drafter. A function of its own, so that each device can have its own cache."""
    again = recompute_mlps, recompute_attended
    return drafter.drafted(hidden_TKH, ropes, anchor_embeds_NH, mask_embed_H, attend, product, *again)


class TrainStep:
    """A drafter, its optimizer and its buffers on one device; used by one thread only.

    `drafter` is taken over: its parameters become views of one flat buffer in the working precision. Give it in fp32,
    the master weights then lose nothing. `grads` and `stats` are what the exchange adds up between `accumulate` and
    `apply`.
    """

    def __init__(
        self, config: TrainConfig, drafter: Drafter, target_ends: TargetEnds, device: str | torch.device
    ) -> None:
        self.config, self.device = config, torch.device(device)
        on_gpu = self.device.type == "cuda"
        if config.graphs == "compiler" and on_gpu:
            torch_setup.check_compiler_graphs(torch_setup.torch_version())
        self.dtype = getattr(torch, config.target.dtype)
        self.embed_VH = target_ends.embed_VH.to(self.device, self.dtype)
        self.mask_token_id = target_ends.mask_token_id

        self.drafter = drafter.to(self.device)
        self.layout, master_P = flatten_parameters(self.drafter, torch.float32, self.device)
        weights_P = master_P if self.dtype == torch.float32 else master_P.to(self.dtype)
        # Where several micro-steps add up, the sum is kept in fp32: bf16 loses the small ones.
        wide = config.optim.micro_steps > 1 and self.dtype != torch.float32
        self._backward_P = torch.zeros_like(weights_P)
        self.grads = torch.zeros_like(master_P) if wide else self._backward_P
        self.stats = torch.zeros(len(STATS), dtype=torch.float32, device=self.device)
        self._report = torch.zeros(len(STATS) + 4, dtype=torch.float64, device=self.device)
        parameters = dict(self.drafter.named_parameters())
        for (name, weight), grad in zip(
            self.layout.views(weights_P).items(), self.layout.views(self._backward_P).values(), strict=True
        ):
            parameters[name].data = weight
            parameters[name].grad = grad

        def joined(names: Sequence[str]) -> torch.Tensor | None:
            weight, grad = (self.layout.joined(flat_P, names) for flat_P in (weights_P, self._backward_P))
            if weight is None:
                return None
            leaf = weight.detach().requires_grad_()
            leaf.grad = grad
            return leaf

        self.drafter.join(joined)
        self._features = self.drafter.fc.in_features
        # Labels that the target makes come from its final states, which then follow the captured ones.
        final = 0 if config.loss.labels == "tokens" else self.drafter.shape.hidden_size
        self.inputs = StepInputs(config, hidden_size=self._features + final, dtype=self.dtype, device=self.device)
        layouts = layer_layouts(config.drafter, config.data.token_budget, config.data.block_slots)
        self.attention = make_attention(config.attention, layouts, self.device)
        use_compile = on_gpu and config.step_compiled
        if on_gpu and config.attention == "flex" and not use_compile:
            raise ConfigError(
                "attention=flex on a GPU needs compile=true: uncompiled, FlexAttention computes every score; "
                "use attention=sdpa to run without the compiler"
            )
        check_options(config, self.drafter, self.device)
        self._product: Product = fp8.linear if config.step.fp8 else torch.nn.functional.linear
        self._elementwise = use_compile and config.elementwise_again
        mode = "reduce-overhead" if config.graphs == "compiler" else None
        self._forward: Callable[..., torch.Tensor] = (
            compiled(drafter_forward, self.device, mode=mode, label="elementwise" if self._elementwise else "")
            if use_compile
            else drafter_forward
        )
        head_VH = target_ends.head_VH.to(self.device, self.dtype)
        # Labels that the target makes want its own head; with labels from the text an 8-bit one is all there is.
        self._labels_head_VH = None if config.loss.labels == "tokens" else head_VH
        self._head = self._make_head(head_VH, use_compile=use_compile)
        self.optimizer = FlatAdamW(
            config.optim,
            config.run.max_steps,
            weights_P,
            master_P,
            update=(lambda function: compiled(function, self.device)) if use_compile else None,
        )
        self._captured: CapturedStep | None = None

    def _make_head(self, head_VH: torch.Tensor, *, use_compile: bool) -> Head:
        if not use_compile:
            return ScaledHead.of(head_VH) if self.config.step.fp8 else PlainHead(head_VH)
        from trainer.model import head_kernels  # Triton is there only where a GPU is

        if not self.config.step.fp8:
            return PlainHead(head_VH, head_kernels.row_pass)
        return ScaledHead.of(head_VH, head_kernels.scaled_row_pass, compiled(fp8.quantise_rows, self.device))

    @property
    def captured(self) -> bool:
        """Whether the step replays CUDA graphs."""
        return self._captured is not None

    def load(self, batch: HiddenBatch) -> None:
        """Copy a batch into the persistent buffers; queued on this thread's stream, the host does not wait for it."""
        self.inputs.load(batch)

    def accumulate(self) -> None:
        """Forward, loss and backward of the loaded batch; adds to `grads` and `stats`."""
        if self._captured is not None:
            self._captured.accumulate()
        else:
            self._accumulate()

    def apply(self) -> None:
        """Update the weights from `grads` and `stats` (sums over everyone), then clear both."""
        if self._captured is not None:
            self._captured.apply()
        else:
            self._apply()

    def _accumulate(self) -> None:
        inputs, block_size, loss = self.inputs, self.config.drafter.block_size, self.config.loss
        final_TH = inputs.hidden_TKH[:, self._features :]
        own_head_VH, choices_T, teacher = self._labels_head_VH, None, None
        if own_head_VH is not None and loss.labels == "argmax":
            choices_T = teacher_choices(final_TH, own_head_VH, loss.chunk_rows)
        block_ids_NB, labels_NB, weights_NB, block_positions_NB = labels_and_weights(
            inputs.input_ids_T,
            inputs.positions_T,
            inputs.doc_ids_T,
            inputs.loss_mask_T,
            inputs.anchors_N,
            inputs.keep_N,
            block_size=block_size,
            mask_token_id=self.mask_token_id,
            gamma=math.inf if loss.weighting == "dpace" else loss.gamma,
            label_ids_T=choices_T,
        )
        if own_head_VH is not None and loss.labels == "kl":
            source_Q = predicting_rows(inputs.anchors_N, block_size, final_TH.shape[0]).flatten()
            teacher = Teacher(final_TH, source_Q, own_head_VH)
        self.attention.fill(inputs.anchors_N, inputs.keep_N, inputs.doc_ids_T, inputs.cu_seqlens_D1)
        anchor_embeds_NH = torch.nn.functional.embedding(block_ids_NB[:, 0], self.embed_VH)
        ropes = self.drafter.ropes(inputs.positions_T, block_positions_NB.flatten())
        with torch.enable_grad():
            # The first place of a block is given and has no weight: nothing after attention need see it.
            drafted_QH = self._forward(
                self.drafter,
                inputs.hidden_TKH[:, : self._features],
                ropes,
                anchor_embeds_NH,
                self.embed_VH[self.mask_token_id],
                self.attention,
                self._product,
                self.config.step.recompute_mlps,
                self._elementwise,
            )
            sums = block_loss(
                drafted_QH,
                self._head,
                labels_NB[:, 1:].flatten(),
                weights_NB[:, 1:].flatten(),
                loss.chunk_rows,
                teacher=teacher,
                reweigh=dpace(block_size - 1, loss.dpace_smoothing) if loss.weighting == "dpace" else None,
            )
            sums.numerator.backward()  # type: ignore[no-untyped-call]  # torch leaves backward unannotated
        with torch.no_grad():
            if self.grads is not self._backward_P:
                self.grads.add_(self._backward_P)
                self._backward_P.zero_()
            counted_N = (weights_NB > 0).any(dim=1)
            hits_NB = torch.nn.functional.pad(sums.hits_Q.view(block_ids_NB.shape[0], -1), (1, 0))
            lengths_N = accept_lengths(hits_NB.flatten(), weights_NB.flatten(), block_size)
            values = (
                sums.numerator.detach(),
                sums.denominator,
                sums.correct,
                sums.counted,
                (lengths_N * counted_N).sum(),
                counted_N.sum().float(),
                inputs.tokens,
            )
            self.stats.add_(torch.stack(values))

    def _apply(self) -> None:
        with torch.no_grad():
            norm, lr, updated = self.optimizer.apply(self.grads, self.stats[1])
            tail = torch.stack([x.to(torch.float64) for x in (norm, lr, updated, self.optimizer.step)])
            self._report.copy_(torch.cat((self.stats.to(torch.float64), tail)))
            self.grads.zero_()
            self.stats.zero_()

    def warm_up(self, capturing: Callable[[], None] = lambda: None) -> None:
        """The whole first step, on the very buffers that training uses: compile, run, capture, replay.

        `capturing` is called as a capture begins, where there is one.

        Hold the gate's turn: no other thread may run torch work meanwhile. Weights and optimizer end as they began.
        """
        self.inputs.fill_with_noise(seed=self.config.run.seed, vocab_size=self.embed_VH.shape[0])
        self.optimizer.enabled.fill_(False)
        steps = (self._accumulate, self._apply)
        if self.device.type == "cuda":
            with recomputing(elementwise=self._elementwise):
                if self.config.graphs == "step":
                    self._captured = CapturedStep.capture(*steps, device=self.device, capturing=capturing)
                else:
                    CapturedStep.settle(*steps)
            for step in (self.accumulate, self.apply):
                step()
            torch.cuda.synchronize(self.device)
        else:
            for step in steps:
                step()
        self.grads.zero_()
        self.stats.zero_()
        self._report.zero_()
        self.optimizer.enabled.fill_(True)

    def metrics(self) -> StepMetrics:
        """Numbers of the last applied step; waits for the device.

        Raises RecompileError if anything in the process was compiled after the gate opened.
        """
        torch_setup.check_nothing_compiled()
        values = self._report.tolist()
        sums = dict(zip(STATS, values, strict=False))
        norm, lr, updated, step = values[len(STATS) :]
        return StepMetrics(
            step=int(step),
            loss=sums["numerator"] / max(sums["denominator"], 1e-9),
            accuracy=sums["correct"] / max(sums["counted"], 1.0),
            accept_len=sums["accept_sum"] / max(sums["blocks"], 1.0),
            blocks=int(sums["blocks"]),
            tokens=int(sums["tokens"]),
            lr=lr,
            grad_norm=norm,
            updated=bool(updated),
        )

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of every parameter in the working precision, by name."""
        return {name: view.clone() for name, view in self.layout.views(self.optimizer.weights_P).items()}

    def fingerprint(self) -> int:
        """The sum of the master weights' bit patterns; waits for the device. One pass over them, no copy."""
        return self.optimizer.fingerprint()

    def state_dict(self) -> dict[str, Any]:
        """Everything that a bit-exact resume of this drafter needs, copied to host memory."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state in place; works after `warm_up` too, captured graphs stay valid."""
        self.optimizer.load_state_dict(state)
