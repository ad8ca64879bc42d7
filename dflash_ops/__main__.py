"""`python -m dflash_ops` is `fab` with the fabfile of this checkout, from any directory."""

from __future__ import annotations

import sys

from fabric.main import program

from dflash_ops.hosts import checkout


def main() -> None:
    program.run([sys.argv[0], "--search-root", str(checkout()), *sys.argv[1:]])


if __name__ == "__main__":
    main()
