"""The loss, its gradient and its metrics do not see the mesh, and no device sees the whole vocabulary."""

from collections.abc import Callable

import pytest


@pytest.mark.medium
def test_every_mesh_computes_what_one_device_does(run_on_devices: Callable[[int, str], str]) -> None:
    assert run_on_devices(4, "from tests.fixtures.meshes import main; main()").strip() == "equal"


@pytest.mark.medium
def test_adapters_have_the_same_gradient_on_every_mesh(run_on_devices: Callable[[int, str], str]) -> None:
    assert run_on_devices(4, "from tests.fixtures.meshes import adapters; adapters()").strip() == "equal"
