"""Checkpoints: whole or absent, verified before use, refused when they belong to another run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from small_run import events, run_small, small_config

from trainer.checkpoint import (
    MODEL,
    OPTIMIZER,
    STATE,
    CheckpointCorrupt,
    CheckpointError,
    CheckpointStore,
    Progress,
    Snapshot,
    copy_to_cpu,
    verify,
)
from trainer.config import override, to_dict
from trainer.resume import CheckpointMismatch, choose_checkpoint, compare_config

CONFIG = small_config()


def snapshot(step: int, value: float = 1.0) -> Snapshot:
    progress = Progress(step=step, next_batch=2 * step, cursor={"index": 2 * step, "pool": [[1, 2]]}, tokens=10 * step)
    weights = {"fc.weight": torch.full((3, 2), value), "norm.weight": torch.ones(3)}
    return copy_to_cpu(progress, weights, {"masters": torch.full((7,), value), "step": step})


def saved(directory: Path, *steps: int, keep_last: int = 9) -> CheckpointStore:
    store = CheckpointStore(directory / "checkpoints", keep_last=keep_last)
    for step in steps:
        store.save(snapshot(step), CONFIG)
    return store


class TestContents:
    def test_three_files_with_what_they_promise(self, tmp_path: Path) -> None:
        path = saved(tmp_path, 42).steps()[0]
        assert path.name == "step-00000042"
        assert sorted(p.name for p in path.iterdir()) == [MODEL, OPTIMIZER, STATE]
        assert set(load_file(path / MODEL)) == {"fc.weight", "norm.weight"}
        state = json.loads((path / STATE).read_text())
        assert state["step"] == 42
        assert state["cursor"] == {"index": 84, "pool": [[1, 2]]}
        assert state["torch"] == torch.__version__
        assert state["config"] == to_dict(CONFIG)
        assert len(state["weights_sha256"]) == 64

    @settings(max_examples=30, deadline=None)
    @given(
        state=st.recursive(
            st.one_of(
                st.integers(-5, 5),
                st.floats(allow_nan=False),
                st.none(),
                st.booleans(),
                st.text(max_size=5),
                st.builds(lambda n: torch.arange(n, dtype=torch.float64), st.integers(0, 4)),
            ),
            lambda inner: st.one_of(
                st.lists(inner, max_size=3), st.dictionaries(st.text("abc.", min_size=1, max_size=3), inner, max_size=3)
            ),
            max_leaves=8,
        )
    )
    def test_any_nested_optimizer_state_comes_back(self, state: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Keys with dots, empty containers and bare values included."""
        directory = tmp_path_factory.mktemp("ck")
        store = CheckpointStore(directory)
        wrapped = {"inner": state}
        path = store.save(replace(snapshot(1), optimizer=wrapped), CONFIG)
        assert same(store.load(path).optimizer, wrapped)
        shutil.rmtree(directory)

    def test_keys_with_dots_do_not_collide(self, tmp_path: Path) -> None:
        """Fails (one tensor overwrites the other) without the loop that makes storage keys unique."""
        store = CheckpointStore(tmp_path)
        state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(2)}}
        assert same(store.load(store.save(replace(snapshot(1), optimizer=state), CONFIG)).optimizer, state)

    def test_a_snapshot_is_a_copy(self) -> None:
        """Fails when the writer shares memory with the training step; the optimizer's state is a copy by contract."""
        weight = torch.ones(2)
        taken = copy_to_cpu(Progress(step=1, next_batch=2, cursor=None), {"w": weight}, {})
        weight.fill_(9)
        assert taken.weights["w"].tolist() == [1, 1]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class TestRetention:
    def test_keep_last(self, tmp_path: Path) -> None:
        store = saved(tmp_path, 1, 2, 3, 4, keep_last=2)
        assert [p.name for p in store.steps()] == ["step-00000003", "step-00000004"]
        assert sorted(p.name for p in store.directory.iterdir()) == ["step-00000003", "step-00000004"]

    def test_the_best_is_kept_beyond_keep_last(self, tmp_path: Path) -> None:
        """Fails when pruning does not look at the link."""
        store = saved(tmp_path, 1, keep_last=2)
        assert store.mark_best(1, 2.5)
        for step in (2, 3, 4):
            store.save(snapshot(step), CONFIG)
            assert not store.mark_best(step, 2.4)
        assert [p.name for p in store.steps()] == ["step-00000001", "step-00000003", "step-00000004"]
        assert (store.directory / "best").resolve().name == "step-00000001"
        assert store.mark_best(4, 2.6)
        assert (store.directory / "best").resolve().name == "step-00000004"

    def test_the_best_is_remembered_across_processes(self, tmp_path: Path) -> None:
        saved(tmp_path, 1).mark_best(1, 3.0)
        later = saved(tmp_path, 2)
        assert not later.mark_best(2, 2.9)

    def test_a_step_that_was_not_saved_is_never_best(self, tmp_path: Path) -> None:
        assert not saved(tmp_path, 1).mark_best(7, 9.0)

    def test_saving_a_step_again_replaces_it(self, tmp_path: Path) -> None:
        store = saved(tmp_path, 5)
        path = store.save(snapshot(5, value=2.0), CONFIG)
        assert store.load(path).weights["fc.weight"][0, 0] == 2.0


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


class TestDamage:
    @pytest.mark.parametrize("damage", [cut, alter, Path.unlink])
    @pytest.mark.parametrize("name", [MODEL, OPTIMIZER, STATE])
    def test_every_damage_is_found_and_names_the_file(
        self, tmp_path: Path, name: str, damage: Callable[[Path], None]
    ) -> None:
        """Fails when only sizes are compared (alter) or only hashes of the model file."""
        path = saved(tmp_path, 3).steps()[0]
        if name == STATE and damage is alter:
            (path / name).write_text("{not json")
        elif name == STATE and damage is cut:
            (path / name).write_text((path / name).read_text()[:100])
        else:
            damage(path / name)
        with pytest.raises(CheckpointCorrupt, match=name):
            verify(path)

    def test_auto_takes_the_newest_intact_and_says_what_it_passed_over(self, tmp_path: Path) -> None:
        store = saved(tmp_path, 1, 2, 3)
        alter(store.steps()[-1] / MODEL)
        resume = choose_checkpoint(override(CONFIG, {"run.resume": "auto"}), store)
        assert resume.loaded is not None
        assert resume.loaded.progress.step == 2
        assert any("step-00000003" in note and "SHA-256" in note for note in resume.notes)

    def test_a_damaged_one_no_longer_counts_as_kept(self, tmp_path: Path) -> None:
        """keep_last=1: the next save once dropped the intact ones and kept the damaged one, which has a later step."""
        store = saved(tmp_path, 1, 3, keep_last=9)
        alter(store.steps()[-1] / MODEL)
        store = CheckpointStore(store.directory, keep_last=1)
        choose_checkpoint(override(CONFIG, {"run.resume": "auto"}), store)
        store.save(snapshot(2), CONFIG)
        assert [p.name for p in store.steps()] == ["step-00000002"]
        assert store.newest_intact().path == store.steps()[0]
        assert [p for p in store.directory.iterdir() if p.name.startswith("damaged-step-00000003")]

    def test_nothing_intact_is_no_fresh_start(self, tmp_path: Path) -> None:
        """It once began again at step 0 into the same directory."""
        store = saved(tmp_path, 1, 2)
        for path in store.steps():
            cut(path / MODEL)
        with pytest.raises(CheckpointCorrupt, match=r"no checkpoint in .* is intact"):
            choose_checkpoint(override(CONFIG, {"run.resume": "auto"}), store)
        assert len(store.steps()) == 2

    def test_an_older_one_beside_later_ones_is_refused(self, tmp_path: Path) -> None:
        """keep-last and --resume auto go by step: both would have preferred the abandoned ones."""
        store = saved(tmp_path, 1, 2)
        config = override(CONFIG, {"run.resume": str(store.steps()[0])})
        with pytest.raises(ValueError, match="later steps"):
            choose_checkpoint(config, store)
        assert choose_checkpoint(config, CheckpointStore(tmp_path / "new")).loaded is not None

    def test_a_digit_that_flipped_in_the_state_is_found(self, tmp_path: Path) -> None:
        """Good JSON still: a run would go on with other data than it should. Fails without the state's own hash."""
        path = saved(tmp_path, 3).steps()[0]
        text = (path / STATE).read_text()
        assert '"next_batch": 6' in text
        (path / STATE).write_text(text.replace('"next_batch": 6', '"next_batch": 7'))
        with pytest.raises(CheckpointCorrupt, match=STATE):
            verify(path)

    def test_a_named_checkpoint_is_never_silently_replaced(self, tmp_path: Path) -> None:
        store = saved(tmp_path, 1, 2)
        cut(store.steps()[-1] / OPTIMIZER)
        with pytest.raises(CheckpointCorrupt, match=OPTIMIZER):
            choose_checkpoint(override(CONFIG, {"run.resume": str(store.steps()[-1])}), store)

    def test_not_a_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="not a checkpoint directory"):
            verify(tmp_path / "nowhere")

    def test_a_later_format_is_refused(self, tmp_path: Path) -> None:
        path = saved(tmp_path, 1).steps()[0]
        state = json.loads((path / STATE).read_text())
        (path / STATE).write_text(json.dumps({**state, "format": 99}))
        with pytest.raises(CheckpointError, match="format 99"):
            verify(path)


KILLED_WHILE_SAVING = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import trainer.checkpoint as checkpoint
from test_checkpoint import CONFIG, saved, snapshot
directory, point = Path(sys.argv[1]), sys.argv[3]
store = saved(directory, 1)
real = getattr(checkpoint, point)
calls = 0
def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(checkpoint, point, die)
store.save(snapshot(2), CONFIG)
"""


class TestAtomicity:
    @pytest.mark.parametrize("point", ["_write_tensors", "_sha256", "_fsync_path"])
    def test_killed_while_saving(self, tmp_path: Path, point: str) -> None:
        """kill -9 in the middle of a save: the earlier checkpoint is intact and nothing half-made looks like one.

        Fails when files are written under their final name.
        """
        command = [sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path), str(Path(__file__).parent), point]
        done = subprocess.run(command, timeout=180, check=False, cwd=Path(__file__).parents[2])
        assert done.returncode == -9
        store = CheckpointStore(tmp_path / "checkpoints")
        assert [p.name for p in store.steps()] == ["step-00000001"]
        assert store.newest_intact().path == store.steps()[0]
        assert any(p.name.startswith(".partial-") for p in store.directory.iterdir())
        store.clean()
        assert [p.name for p in store.directory.iterdir()] == ["step-00000001"]

    def test_disk_full(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Said before anything is written, and nothing saved before is lost."""
        store = saved(tmp_path, 1)
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(CheckpointError, match=r"MB are free.*earlier checkpoints are untouched"):
            store.save(snapshot(2), CONFIG)
        assert [p.name for p in store.directory.iterdir()] == ["step-00000001"]
        assert verify(store.steps()[0])["step"] == 1

    @pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
    def test_disk_really_full(self, tmp_path: Path) -> None:
        """A file system of 3 MB: the write itself fails, and the earlier checkpoint survives."""
        mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)], check=False)
        if mount.returncode != 0:
            pytest.skip("mount is not allowed here")
        try:
            store = saved(tmp_path, 1)
            store._require_space = lambda snapshot: None  # type: ignore[method-assign]  # as if it filled up meanwhile
            big = replace(snapshot(2), weights={"fc.weight": torch.ones(1_000_000)})
            with pytest.raises(CheckpointError, match="step-00000002"):
                store.save(big, CONFIG)
            assert [p.name for p in store.directory.iterdir()] == ["step-00000001"]
            assert verify(store.steps()[0])["step"] == 1
        finally:
            subprocess.run(["umount", str(tmp_path)], check=True)


class TestAgreement:
    def test_the_same_configuration_is_silent(self) -> None:
        assert compare_config(to_dict(CONFIG), CONFIG) == []

    def test_limits_of_the_run_may_differ(self) -> None:
        changed = override(CONFIG, {"run.log_every": "7", "run.resume": "auto", "run.keep_last": "5"})
        assert compare_config(to_dict(CONFIG), changed) == []
        (note,) = compare_config(to_dict(CONFIG), override(CONFIG, {"run.max_steps": "99"}))
        assert "learning rate" in note

    @pytest.mark.parametrize(
        ("key", "value"),
        [("optim.lr", "1e-3"), ("data.token_budget", "256"), ("drafter.intermediate_size", "32"), ("run.seed", "1")],
    )
    def test_everything_else_is_refused_by_name(self, key: str, value: str) -> None:
        with pytest.raises(CheckpointMismatch, match=key):
            compare_config(to_dict(CONFIG), override(CONFIG, {key: value}))

    def test_all_differing_keys_are_listed(self) -> None:
        with pytest.raises(CheckpointMismatch) as caught:
            compare_config(to_dict(CONFIG), override(CONFIG, {"optim.lr": "1e-3", "loss.gamma": "3"}))
        assert "optim.lr" in str(caught.value)
        assert "loss.gamma" in str(caught.value)

    def test_devices_may_move_but_the_number_of_drafters_may_not(self) -> None:
        assert compare_config(to_dict(CONFIG), override(CONFIG, {"topology.target": "cpu,cpu"})) == []
        with pytest.raises(CheckpointMismatch, match="number of drafters"):
            compare_config(to_dict(CONFIG), override(CONFIG, {"topology.drafter": "cpu,cpu,cpu"}))

    def test_another_way_of_executing_is_noted(self) -> None:
        (note,) = compare_config(to_dict(CONFIG), override(CONFIG, {"graphs": "none"}))
        assert "not the same bits" in note

    def test_a_finished_run_has_nothing_to_resume(self, tmp_path: Path) -> None:
        store = saved(tmp_path, CONFIG.run.max_steps)
        with pytest.raises(ValueError, match="nothing is left"):
            choose_checkpoint(override(CONFIG, {"run.resume": "auto"}), store)

    def test_auto_without_a_checkpoint_starts_fresh_and_says_so(self, tmp_path: Path) -> None:
        resume = choose_checkpoint(override(CONFIG, {"run.resume": "auto"}), CheckpointStore(tmp_path / "none"))
        assert resume.loaded is None
        assert "fresh start" in resume.notes[0]


def test_resume_is_exact_bit_for_bit(tmp_path: Path) -> None:
    """Six steps in one go, and the last three again from the checkpoint in the middle: same losses, same weights.

    Two drafters and two micro-steps, so the cursor, the routing and the accumulation all have to agree. Fails when
    the cursor of any but the last batch of the step is stored, or when the schedule restarts.
    """
    config = small_config({"optim.micro_steps": "2"})
    code, _ = run_small(config, tmp_path / "whole")
    assert code == 0
    store = CheckpointStore(tmp_path / "whole" / "checkpoints")
    middle = store.load(tmp_path / "whole/checkpoints/step-00000003")
    code, _ = run_small(config, tmp_path / "rest", resumed=middle)
    assert code == 0
    keys = ("step", "loss", "grad_norm", "lr", "accept_len", "accuracy", "tokens")
    whole = [[row[key] for key in keys] for row in events(tmp_path / "whole", "step")]
    rest = [[row[key] for key in keys] for row in events(tmp_path / "rest", "step")]
    assert rest == whole[3:]
    assert (
        store.load(tmp_path / "whole/checkpoints/step-00000006").weights_sha256
        == store.load(tmp_path / "rest/checkpoints/step-00000006").weights_sha256
    )
    (end,) = events(tmp_path / "rest", "end")
    assert end["summary"]["loss_first"] == whole[0][1]
