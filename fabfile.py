"""The fab namespace. `fab --list` shows the verbs; they are in dflash_ops/tasks.py, reading.py and care.py."""

from dflash_ops import care, reading, tasks
from dflash_ops.cli import ns

__all__ = ["care", "ns", "reading", "tasks"]
