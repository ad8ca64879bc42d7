"""data.reuse: the schedule, fresh anchors, an exact resume, and numbers that do not count anything twice.

Shown able to fail: with the cursor of the newest batch in the checkpoint the resumed run has other data than the
reservoir had, and ends with another batch's number; with the first seed used again each time has the same anchors.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_run import events, run_small, small_config, small_parts

from trainer.checkpoint import CheckpointStore
from trainer.config import ConfigError, DataConfig, override, to_dict
from trainer.data.reuse import ReusePlan
from trainer.memory import needs
from trainer.model.anchors import valid_anchors
from trainer.model.target_models import TargetFacts
from trainer.resume import compare_config

plans = st.builds(ReusePlan, times=st.integers(1, 6), spacing=st.integers(1, 4))


class TestThePlan:
    @given(plans)
    def test_every_batch_comes_k_times_in_order_and_never_twice_running(self, plan: ReusePlan) -> None:
        periods = 3 * plan.times * plan.spacing + 5
        places = [plan.at(place) for place in range(periods * plan.times)]
        when: dict[int, list[int]] = defaultdict(list)
        for place, (batch, before) in enumerate(places):
            assert before == len(when[batch])
            when[batch].append(place)
        assert [batch for batch, before in places if before == 0] == list(range(len(when)))
        done = [at for at in when.values() if len(at) == plan.times]
        assert len(done) >= periods - plan.reservoir - 1
        for at in done:
            assert all(later - earlier >= 2 for earlier, later in pairwise(at))
        last = done[-1]
        assert {b - a for a, b in pairwise(last)} <= {plan.times * plan.spacing + 1}

    @given(plans, st.integers(0, 200))
    def test_the_reservoir_holds_what_is_needed_again_and_no_more(self, plan: ReusePlan, place: int) -> None:
        later = [plan.at(p)[0] for p in range(place, place + 3 * plan.times * plan.reservoir)]
        assert plan.oldest(place) == min(later)
        assert plan.taken(place) == 1 + max((plan.at(p)[0] for p in range(place)), default=-1)
        assert plan.taken(place + 1) - plan.oldest(place) <= plan.reservoir

    def test_once_is_the_plain_order(self) -> None:
        plan = ReusePlan.of(DataConfig())
        assert [plan.at(place) for place in range(4)] == [(0, 0), (1, 0), (2, 0), (3, 0)]
        assert [(plan.oldest(n), plan.taken(n)) for n in range(4)] == [(n, n) for n in range(4)]

    def test_a_larger_reservoir_spreads_wider(self) -> None:
        assert ReusePlan.of(DataConfig(reuse=3)).reservoir == 3
        assert ReusePlan.of(DataConfig(reuse=3, reuse_reservoir=8)) == ReusePlan(3, 3)

    @pytest.mark.parametrize(("reuse", "reservoir"), [(0, None), (1, 4), (3, 2)])
    def test_what_makes_no_sense_is_refused(self, reuse: int, reservoir: int | None) -> None:
        with pytest.raises(ConfigError, match=r"data\.reuse"):
            DataConfig(reuse=reuse, reuse_reservoir=reservoir)


class TestAnchors:
    def test_each_time_has_its_own_and_the_first_stay_as_they_were(self) -> None:
        once = small_parts(small_config()).open_source(None)
        thrice = small_parts(small_config({"data.reuse": "3"})).open_source(None)
        for _ in range(3):
            plain, packed = next(once), next(thrice)
            assert torch.equal(plain.anchors_N, packed.anchors_N)
            assert plain.again == ()
            assert len(packed.again) == 2
            valid_T = valid_anchors(packed.loss_mask_T, packed.doc_ids_T)
            drawn = [packed.anchors_N, *(anchors_N for anchors_N, _ in packed.again)]
            for anchors_N, keep_N in packed.again:
                assert bool(valid_T[anchors_N[keep_N].long()].all())
            assert len({tuple(anchors_N.tolist()) for anchors_N in drawn}) == 3


def steps(directory: Path) -> list[dict[str, Any]]:
    return events(directory, "step")


REUSE = {"data.reuse": "3", "run.max_steps": "12", "run.eval_every": "99", "run.decode_prompts": "0"}


class TestARun:
    @pytest.mark.parametrize(("reservoir", "every"), [("none", 7), ("5", 2)])
    def test_resume_is_exact_bit_for_bit(self, reservoir: str, every: int, tmp_path: Path) -> None:
        """From within a period; and from so early that the first batch is still needed, so there is no cursor yet."""
        more = {**REUSE, "data.reuse_reservoir": reservoir, "run.checkpoint_every": str(every)}
        config = small_config({**more, "run.keep_last": "9"})
        code, _ = run_small(config, tmp_path / "whole")
        assert code == 0
        store = CheckpointStore(tmp_path / "whole" / "checkpoints")
        middle = store.load(tmp_path / f"whole/checkpoints/step-{every:08d}")
        assert (middle.progress.cursor is None) == (every == 2)
        code, _ = run_small(config, tmp_path / "rest", resumed=middle)
        assert code == 0
        keys = ("step", "loss", "grad_norm", "lr", "accept_len", "accuracy", "tokens")
        whole, rest = ([[row[key] for key in keys] for row in steps(tmp_path / d)] for d in ("whole", "rest"))
        assert rest == whole[every:]
        assert (
            store.load(tmp_path / "whole/checkpoints/step-00000012").weights_sha256
            == store.load(tmp_path / "rest/checkpoints/step-00000012").weights_sha256
        )

    def test_any_number_of_targets_gives_the_same_bits_and_fresh_tokens_count_once(self, tmp_path: Path) -> None:
        config = small_config(REUSE)
        code, _ = run_small(config, tmp_path / "1")
        assert code == 0
        more = {**REUSE, "topology.target": "cpu,cpu,cpu", "run.queue_depth": "1"}
        code, _ = run_small(small_config(more), tmp_path / "3")
        assert code == 0
        one, three = steps(tmp_path / "1"), steps(tmp_path / "3")
        assert [row["loss"] for row in one] == [row["loss"] for row in three]

        # Two drafters with the same plan: what is fresh in a step is fresh for both.
        source = small_parts(config).open_source(None)
        fresh = [next(source).tokens for _ in range(2 * ReusePlan(3).taken(12))]
        plan, total = ReusePlan(3), 0
        for row in one:
            batch, before = plan.at(row["step"] - 1)
            total += sum(fresh[2 * batch : 2 * batch + 2]) if before == 0 else 0
            assert row["tokens"] == total
            assert (row["context_tokens_per_s"] > 0) == (before == 0)
            assert (row["reused_context_tokens_per_s"] > 0) == (before > 0)
            assert (row["reused_block_tokens_per_s"] > 0) == (before > 0)
        assert events(tmp_path / "1", "end")[0]["summary"]["reused_context_tokens_per_s"] > 0

    def test_without_it_nothing_is_said_of_it(self, tmp_path: Path) -> None:
        code, _ = run_small(small_config({"run.max_steps": "1"}), tmp_path)
        assert code == 0
        assert steps(tmp_path)[0]["reused_context_tokens_per_s"] is None
        assert events(tmp_path, "end")[0]["summary"]["reused_context_tokens_per_s"] is None


def test_the_reservoir_is_in_the_estimate_where_hidden_states_lie() -> None:
    facts = TargetFacts(parameters=0, hidden_size=64, vocab_size=100, features=3)
    places = {"topology.target": "cuda:0,cuda:1", "topology.drafter": "cuda:2,cuda:3,cuda:4"}

    def waiting(**more: str) -> list[int]:
        found = needs(override(small_config(), {**places, **more}), facts)
        return [need.bytes for need in found if need.role.startswith("hidden states")]

    batch = 192 * 3 * 64 * 4
    (before, _), after = waiting(), waiting(**{"data.reuse": "4"})
    # Three drafters keep three more each; two targets made them.
    assert after == [before + 5 * batch] * 2


def test_a_checkpoint_from_before_the_setting_goes_on() -> None:
    saved = to_dict(small_config())
    del saved["data"]["reuse"], saved["data"]["reuse_reservoir"]
    assert compare_config(saved, small_config()) == []


def test_a_reservoir_that_no_batch_comes_back_from_is_refused() -> None:
    """Six places a drafter: batch 0 comes again at place 5 where four others lie between, and never where five do.

    Seen to fail without `check_reuse`: such a run trained every batch once, and said nothing.
    """
    assert ReusePlan.of(small_config({"data.reuse": "2", "data.reuse_reservoir": "5"}).data).at(5) == (0, 1)
    with pytest.raises(ConfigError, match="nothing would be reused"):
        small_config({"data.reuse": "2", "data.reuse_reservoir": "6"})
    small_config({"data.reuse": "2", "data.reuse_reservoir": "6", "optim.micro_steps": "2"})


def test_so_many_times_that_packing_a_batch_would_not_end_are_refused() -> None:
    """Seen to fail without the bound: anchors were drawn for all of the times before the first step."""
    with pytest.raises(ConfigError, match=r"data\.reuse must be at most"):
        small_config({"data.reuse": str(2**62)})
