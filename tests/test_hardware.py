"""The table of accelerators and its one error."""

import pytest

from empo2_jax.errors import ConfigError
from empo2_jax.hardware import HARDWARE, find_hardware


def test_a_chip_is_found_by_name_and_every_figure_has_a_source() -> None:
    chip = find_hardware("a100-40")
    assert (chip.memory, chip.flops, chip.bandwidth) == (40e9, 312e12, 1.555e12)
    assert chip.memory_gib == pytest.approx(37.253, abs=1e-3)
    assert list(HARDWARE) == ["a100-40", "a100-80", "h100", "h200", "v5e", "v5p", "v6e"]
    assert all(chip.host <= chip.island for chip in HARDWARE.values())
    assert all(chip.source.startswith("https://") and chip.link < chip.bandwidth for chip in HARDWARE.values())


@pytest.mark.parametrize(("name", "near"), [("a100-41", "a100-40"), ("H200", "h200"), ("v5", "v5e"), ("", "a100-40")])
def test_an_unknown_name_names_the_nearest_one(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"hardware '{name}' is not known; the nearest known one is `{near}`"):
        find_hardware(name)
