"""The fab namespace. `fab --list` shows the verbs; they are in dflash_ops/tasks.py, reading.py and care.py."""

import os
import sys

from fabric.main import program

# Invoke switches this off, which keeps a lone fabfile's directory clean; compiling our whole package anew would be half
# of what a command costs.
sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))

from dflash_ops import care, reading, tasks  # noqa: E402  # after the switch above
from dflash_ops.cli import ns  # noqa: E402
from dflash_ops.executor import usage_exits_2  # noqa: E402

usage_exits_2(program)

__all__ = ["care", "ns", "reading", "tasks"]
