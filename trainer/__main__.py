"""`python -m trainer`: see `trainer.cli`."""

from trainer.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
