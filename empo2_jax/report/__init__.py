"""`report.html`: one self-contained page about one run, made from the files in its directory and nothing else."""

from empo2_jax.report.page import write_report

__all__ = ["write_report"]
