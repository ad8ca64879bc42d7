"""Checkpoints as directories, written whole or not at all.

    checkpoints/step-00000042/
        model.safetensors       the drafter under its published keys
        optimizer.safetensors   fp32 masters, moments and whatever else TrainStep needs to go on
        state.json              step, data cursor, configuration, hashes, torch version
    checkpoints/best -> step-00000040

Writing: a hidden temporary directory, fsync of every file, one rename, fsync of the parent. A reader sees a
complete checkpoint or none. Reading verifies sizes and SHA-256 before a single tensor is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trainer.config import TrainConfig, to_dict
from trainer.tensor_tree import copy, join, split, tensors_of

FORMAT = 1
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(Exception):
    """A checkpoint cannot be written or used; the message says which file and why."""


class CheckpointCorrupt(CheckpointError):
    """A file of the checkpoint is missing, cut or altered."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands after a step, beyond what the tensors say. JSON types only."""

    step: int
    next_batch: int
    """Index of the first batch that the next step needs: with data.reuse the oldest one in the reservoirs."""
    cursor: dict[str, Any] | None
    """The data source before that batch; None at its beginning."""
    tokens: int = 0
    loss_first: float | None = None
    accept_len_first: float | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a checkpoint holds, copied to the CPU so that training may go on while it is written."""

    progress: Progress
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    """`TrainStep.state_dict()`: nested dicts and lists of tensors and JSON values."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A verified checkpoint."""

    path: Path
    progress: Progress
    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest intact checkpoint of a directory, and why newer ones were passed over."""

    path: Path | None
    skipped: dict[Path, str] = field(default_factory=dict)


def copy_to_cpu(progress: Progress, weights: dict[str, torch.Tensor], optimizer: dict[str, Any]) -> Snapshot:
    """Copy, so that the next step cannot change what is being written; `state_dict` made its copies itself."""
    return Snapshot(progress, {key: copy(value) for key, value in weights.items()}, optimizer)


class CheckpointStore:
    """The checkpoints directory of one run."""

    def __init__(self, directory: Path, *, keep_last: int = 2) -> None:
        self.directory = directory
        self._keep_last = keep_last
        self._best_lock = threading.Lock()

    def save(self, snapshot: Snapshot, config: TrainConfig) -> Path:
        """Write one checkpoint, then drop the ones beyond keep-last (never the best). Returns its path.

        Raises CheckpointError when the disk is full or refuses; what was saved before stays as it was.
        """
        final = self.directory / f"step-{snapshot.progress.step:08d}"
        partial = self.directory / f".partial-{final.name}-{os.getpid()}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._require_space(snapshot)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            self._write(partial, snapshot, config)
            if final.exists():
                self._discard(final)
            partial.rename(final)
            _fsync_path(self.directory)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"cannot save {final}: {error}; earlier checkpoints are untouched. Free space or choose another run "
                "directory, then go on with --resume auto"
            ) from error
        with self._best_lock:
            self._prune()
        return final

    def load(self, path: Path) -> Loaded:
        """Read and verify one checkpoint. Raises CheckpointCorrupt naming the file."""
        state = verify(path)
        try:
            weights, optimizer = load_file(path / MODEL), load_file(path / OPTIMIZER)
        except (OSError, SafetensorError) as error:
            raise CheckpointCorrupt(f"{path}: {error}") from error
        return Loaded(
            path=path,
            progress=Progress(**state["progress"]),
            config=state["config"],
            weights=weights,
            optimizer=join(state["optimizer"], optimizer),
            weights_sha256=state["files"][MODEL]["sha256"],
        )

    def steps(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        if not self.directory.is_dir():
            return []
        named = ((_NAME.fullmatch(path.name), path) for path in self.directory.iterdir() if not path.is_symlink())
        return [path for _, path in sorted((int(m.group(1)), path) for m, path in named if m and path.is_dir())]

    def later_than(self, step: int) -> list[Path]:
        """Complete checkpoints of later steps."""
        return [path for path in self.steps() if int(path.name.removeprefix("step-")) > step]

    def newest_intact(self) -> Newest:
        """The newest checkpoint that passes `verify`; damaged ones are skipped with their reason."""
        skipped: dict[Path, str] = {}
        for path in reversed(self.steps()):
            try:
                verify(path)
            except CheckpointCorrupt as error:
                skipped[path] = str(error)
                continue
            return Newest(path, skipped)
        return Newest(None, skipped)

    def set_aside(self, path: Path) -> Path:
        """Rename a damaged checkpoint, so that keep-last does not count it as one; nothing is deleted."""
        aside = path.with_name(f"damaged-{path.name}-{time.time_ns()}")
        path.rename(aside)
        return aside

    def clean(self) -> None:
        """Remove what an interrupted writer left behind."""
        if self.directory.is_dir():
            for path in self.directory.iterdir():
                if path.name.startswith((".partial-", ".discard-")):
                    shutil.rmtree(path, ignore_errors=True)

    def mark_best(self, step: int, accept_len: float) -> bool:
        """Point `best` at this step if it exists and beats the best so far; the link moves atomically.

        Raises CheckpointError when the disk is full or refuses; the best so far stays.
        """
        try:
            with self._best_lock:
                return self._mark_best(step, accept_len)
        except OSError as error:
            raise CheckpointError(f"cannot note the best checkpoint in {self.directory}: {error}") from error

    def _mark_best(self, step: int, accept_len: float) -> bool:
        path = self.directory / f"step-{step:08d}"
        record = self.directory / "best.json"
        if not path.is_dir():
            return False
        if record.exists() and (self.directory / "best").exists():
            try:
                if json.loads(record.read_text())["accept_len"] >= accept_len:
                    return False
            except (ValueError, KeyError, TypeError):
                pass  # an unreadable record is replaced below
        link = self.directory / ".best-next"
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        link.replace(self.directory / "best")
        fresh = self.directory / ".best.json"
        fresh.write_text(json.dumps({"step": step, "accept_len": accept_len}) + "\n")
        fresh.replace(record)
        return True

    def _require_space(self, snapshot: Snapshot) -> None:
        tensors = [*snapshot.weights.values(), *tensors_of(snapshot.optimizer)]
        need = sum(tensor.numel() * tensor.element_size() for tensor in tensors) + 2**20
        free = shutil.disk_usage(self.directory).free
        if free < need:
            raise OSError(f"it needs {need / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are free")

    def _write(self, partial: Path, snapshot: Snapshot, config: TrainConfig) -> None:
        skeleton, tensors = split(snapshot.optimizer)
        # Side by side: hashing and writing release the interpreter lock, and a large drafter has 24 GB.
        with ThreadPoolExecutor(2, thread_name_prefix="checkpoint-file") as pool:
            model = pool.submit(_write_tensors, partial / MODEL, snapshot.weights)
            optimizer = pool.submit(_write_tensors, partial / OPTIMIZER, tensors)
            files = {MODEL: model.result(), OPTIMIZER: optimizer.result()}
        progress = snapshot.progress
        state = {
            "format": FORMAT,
            "step": progress.step,
            "cursor": progress.cursor,
            "weights_sha256": files[MODEL]["sha256"],
            "files": files,
            "torch": torch.__version__,
            "time": time.time(),
            "progress": {name: getattr(progress, name) for name in Progress.__dataclass_fields__},
            "config": to_dict(config),
            "optimizer": skeleton,
        }
        state["sha256"] = _own_sha256(state)
        with (partial / STATE).open("w") as file:
            json.dump(state, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        _fsync_path(partial)

    def _prune(self) -> None:
        best = self.directory / "best"
        kept = {best.resolve().name} if best.exists() else set()
        paths = self.steps()
        for path in paths[: -self._keep_last]:
            if path.name not in kept:
                self._discard(path)

    def _discard(self, path: Path) -> None:
        # Renamed first: a deletion cut in the middle must not leave something that looks like a checkpoint.
        aside = path.with_name(f".discard-{path.name}-{time.monotonic_ns()}")
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def verify(path: Path) -> dict[str, Any]:
    """Check every file of a checkpoint by size and hash; returns state.json.

    Raises CheckpointCorrupt naming the file, CheckpointError when `path` is no checkpoint at all.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint directory")
    try:
        state: dict[str, Any] = json.loads((path / STATE).read_text())
        format_, files = state["format"], state["files"]
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{path / STATE} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointCorrupt(f"{path / STATE} is unreadable: {error}") from error
    if format_ != FORMAT:
        raise CheckpointError(f"{path / STATE} has format {format_}; this release reads format {FORMAT}")
    if state.get("sha256") != _own_sha256(state):
        raise CheckpointCorrupt(f"{path / STATE} does not match its SHA-256: it was altered or the disk is failing")
    for name in (MODEL, OPTIMIZER):
        file = path / name
        if not file.is_file():
            raise CheckpointCorrupt(f"{file} is missing")
        if file.stat().st_size != files[name]["bytes"]:
            raise CheckpointCorrupt(f"{file} has {file.stat().st_size} bytes, not {files[name]['bytes']}: it was cut")
        if _sha256(file) != files[name]["sha256"]:
            raise CheckpointCorrupt(f"{file} does not match its SHA-256: it was altered or the disk is failing")
    return state


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    save_file(tensors, path)
    _fsync_path(path)
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _own_sha256(state: dict[str, Any]) -> str:
    """Of everything in state.json beside the hash itself: a digit that flips in a cursor leaves it good JSON."""
    rest = {key: value for key, value in state.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
