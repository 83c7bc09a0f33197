"""Standard output that cannot be written, in real processes: one line that names it, exit code 2."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from empo2_jax.output import output_written
try:
    with output_written():
        print("x" * int(sys.argv[1]))
        {then}
except OSError as error:
    print(f"{{error.filename}}: {{error.strerror}}", file=sys.stderr)
    sys.exit(2)
"""


def run(size: int, then: str = "pass", *options: str) -> tuple[int, str]:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, *options, "-c", SCRIPT.format(then=then), str(size)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


def test_an_output_that_is_full_is_named() -> None:
    """Whether it fails while it is printed, or at the end."""
    for size, options in ((10, ("-E",)), (10, ("-u",)), (100_000, ("-E",))):
        assert run(size, "pass", *options) == (2, "standard output: No space left on device\n")


def test_another_error_stays_as_it_is() -> None:
    code = 'sys.stdout = sys.stderr; open("/nowhere")'
    assert run(10, code, "-E") == (2, "/nowhere: No such file or directory\n")
