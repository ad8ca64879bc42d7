"""The fab namespace. `fab --list` shows the verbs; dflash_ops/tasks.py and dflash_ops/care.py hold them."""

from dflash_ops import care
from dflash_ops.tasks import ns

__all__ = ["care", "ns"]
