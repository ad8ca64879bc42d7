"""The `train` command: from a configuration to an exit code.

Order: signals first, so that a stop during the imports and loads below is heard; then the resume decision,
the parts, the header, the pipeline.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

import torch

from trainer.assembly import assemble, drafter_to_load, first_drafter
from trainer.checkpoint import CheckpointStore
from trainer.config import ConfigError, TrainConfig, to_dict
from trainer.events import End, Start
from trainer.foreseen import FORESEEN
from trainer.metrics import Metrics
from trainer.pipeline import EXIT_CONFIG, EXIT_DONE, EXIT_ERROR, Pipeline
from trainer.resume import choose_checkpoint
from trainer.signals import StopSignals
from trainer.topology import cpu_notes, probe_hardware

PACKAGES = ("transformers", "triton", "flash-linear-attention", "causal-conv1d")


def train(config: TrainConfig, *, run_dir: str, release: str, process_began: float) -> int:
    """Run to the end. Leaves through os._exit once training started: daemon threads may sit in native code."""
    directory = Path(run_dir)
    store = CheckpointStore(directory / "checkpoints", keep_last=config.run.keep_last)
    if config.run.resume is None and store.steps():
        raise ConfigError(
            f"{store.directory} already holds checkpoints; go on with --resume auto, or choose another --run-dir"
        )
    try:
        metrics = Metrics(directory, tensorboard=config.run.tensorboard)
    except OSError as error:
        raise ConfigError(f"--run-dir {run_dir}: {error.strerror}; choose a directory that can be written") from error
    run = _Run(config, metrics, store)
    StopSignals(run.stop, lambda name: metrics.emit(End(reason="killed", exit_code=EXIT_ERROR, step=run.step)))
    code = run.go(release, process_began)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Run:
    """Holds what a signal may meet: nothing yet, or a pipeline."""

    def __init__(self, config: TrainConfig, metrics: Metrics, store: CheckpointStore) -> None:
        self._config = config
        self._metrics = metrics
        self._store = store
        self._lock = threading.Lock()
        self._pipeline: Pipeline | None = None

    @property
    def step(self) -> int:
        with self._lock:
            return self._pipeline.step if self._pipeline else 0

    def stop(self, name: str) -> None:
        with self._lock:
            pipeline = self._pipeline
            if pipeline is None:
                self._leave_early(name)
        pipeline.request_stop(name)

    def _leave_early(self, name: str) -> NoReturn:
        self._metrics.say(f"{name} during start-up: nothing was trained, nothing to save")
        self._metrics.emit(End(reason="stopped", exit_code=EXIT_DONE, step=0))
        os._exit(EXIT_DONE)

    def go(self, release: str, process_began: float) -> int:
        config, metrics = self._config, self._metrics
        try:
            resume = choose_checkpoint(config, self._store)
            hardware = probe_hardware()
            metrics.emit(
                Start(
                    release=release,
                    variant=config.variant,
                    config=to_dict(config),
                    versions=versions(),
                    gpus=list(hardware.gpus),
                    cpuset=sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
                    notes=[*cpu_notes(config), *resume.notes],
                    resumed_from=str(resume.loaded.path) if resume.loaded else None,
                    step=resume.loaded.progress.step if resume.loaded else 0,
                )
            )
            pipeline = Pipeline(
                config,
                assemble(
                    config, metrics.say, make_drafter=drafter_to_load if resume.loaded is not None else first_drafter
                ),
                metrics,
                self._store,
                resumed=resume.loaded,
                process_began=process_began,
                alarm=True,
            )
        except FORESEEN as error:
            return self._failed(str(error), EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_ERROR)
        except Exception as error:  # noqa: BLE001  # the log must hold what nobody foresaw, and `end` must be written
            metrics.say(traceback.format_exc())
            return self._failed(f"{type(error).__name__}: {error}", EXIT_ERROR)
        with self._lock:
            self._pipeline = pipeline
        return pipeline.run()

    def _failed(self, error: str, code: int) -> int:
        self._metrics.emit(End(reason="error", exit_code=code, step=0, error=error))
        self._metrics.close()
        return code


def versions() -> dict[str, str]:
    """What the run is made of; a package that is not installed is `absent`."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found
