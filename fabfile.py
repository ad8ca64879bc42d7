"""The fab namespace. `fab --list` shows the verbs; dflash_ops/tasks.py holds them."""

from dflash_ops.tasks import ns

__all__ = ["ns"]
