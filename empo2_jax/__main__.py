"""`empo2` and `python -m empo2_jax`: the command line, also answering a Ctrl-C that strikes before or after it."""

import signal
import sys

from empo2_jax.interrupts import uninterrupted


def main() -> int:
    """Import and run `cli.main`; returns the exit code."""
    try:
        with uninterrupted():
            from empo2_jax import cli
        code = cli.main()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is over: an exit handler would answer with a traceback
        return code
    except KeyboardInterrupt:  # before or after `cli.main` could answer itself
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
