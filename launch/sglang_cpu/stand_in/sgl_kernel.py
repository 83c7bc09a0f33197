"""Stands in for SGLang's CUDA kernels, whose wheel does not import on a CPU: every name is there, none can be called.

SGLang imports these names at start. With `--attention-backend torch_native` on a CPU it calls none of them.
"""

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0"
__path__: list[str] = []  # submodules do not exist, attributes do


def __getattr__(name: str) -> Callable[..., Any]:
    """A function that raises when it is called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU; this is the CPU stand-in")

    return missing
