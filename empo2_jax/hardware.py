"""Accelerators by name: the few figures that decide whether a run fits and how long an update takes.

Figures are the makers' own for one chip (NVIDIA: SXM boards, dense rates without sparsity). Memory is as sold, in units
of 10⁹ bytes; devices report 4 to 7 % more, which is left to the runtime.
"""

import difflib
import os
from dataclasses import dataclass

from empo2_jax.errors import ConfigError


@dataclass(frozen=True)
class Hardware:
    """One kind of chip."""

    name: str
    memory: float  # bytes
    flops: float  # peak in bf16, per second
    bandwidth: float  # of the memory, bytes per second
    link: float  # to its neighbors, bytes per second in one direction
    island: int  # chips joined by that link
    host: int  # chips of one machine, which one process can have
    source: str  # where the figures stand

    @property
    def memory_gib(self) -> float:
        """Memory in GiB."""
        return self.memory / 2**30


def host_memory() -> int:
    """Memory of this machine, bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_H100 = "https://www.nvidia.com/en-us/data-center/h100/"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
_TPU = "https://docs.cloud.google.com/tpu/docs"

HARDWARE: dict[str, Hardware] = {
    chip.name: chip
    for chip in (
        Hardware("a100-40", 40e9, 312e12, 1.555e12, 300e9, 8, 8, _A100),
        Hardware("a100-80", 80e9, 312e12, 2.039e12, 300e9, 8, 8, _A100),
        Hardware("h100", 80e9, 989e12, 3.35e12, 450e9, 8, 8, _H100),
        Hardware("h200", 141e9, 989e12, 4.8e12, 450e9, 8, 8, _H200),
        Hardware("v5e", 16e9, 197e12, 0.819e12, 200e9, 256, 8, f"{_TPU}/v5e"),
        Hardware("v5p", 95e9, 459e12, 2.765e12, 600e9, 6144, 4, f"{_TPU}/v5p"),
        Hardware("v6e", 32e9, 918e12, 1.638e12, 400e9, 256, 8, f"{_TPU}/v6e"),
    )
}


def find_hardware(name: str) -> Hardware:
    """The chip of that name.

    Raises:
        ConfigError: no such chip; names the nearest one and all of them.
    """
    if name not in HARDWARE:
        longer = [known for known in HARDWARE if known.startswith(name.lower())]
        near = (longer or difflib.get_close_matches(name.lower(), HARDWARE, n=1, cutoff=0.0))[0]
        known = ", ".join(HARDWARE)
        raise ConfigError(f"hardware {name!r} is not known; the nearest known one is `{near}` (allowed: {known})")
    return HARDWARE[name]
