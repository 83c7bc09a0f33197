"""EMPO² in JAX: language-model agents that explore with memory and learn from it (arXiv 2602.23008)."""

__version__ = "0.1.0"
