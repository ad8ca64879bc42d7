"""Errors whose message says all that a user needs: they are told without a traceback."""

from trainer.checkpoint import CheckpointError
from trainer.config import ConfigError
from trainer.data.documents import DataError
from trainer.export import ExportError
from trainer.model.target_models import TargetError
from trainer.torch_setup import TorchUnfitError

FORESEEN = (CheckpointError, ConfigError, DataError, ExportError, TargetError, TorchUnfitError)
