"""`empo2` and `python -m empo2_jax`: the command line, also answering a Ctrl-C that strikes while it is imported."""

import sys

from empo2_jax.interrupts import uninterrupted


def main() -> int:
    """Import and run `cli.main`; returns the exit code."""
    try:
        with uninterrupted():
            from empo2_jax import cli
        return cli.main()
    except KeyboardInterrupt:  # before or after `cli.main` could answer itself
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
