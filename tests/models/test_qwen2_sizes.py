"""The shapes of Qwen2.5 against the published numbers of parameters."""

import pytest

from empo2_jax.models.qwen2_sizes import QWEN2_5, size_in

PUBLISHED = {
    "0.5B": 494_032_768,
    "1.5B": 1_543_714_304,
    "3B": 3_085_938_688,
    "7B": 7_615_616_512,
    "14B": 14_770_033_664,
    "32B": 32_763_876_352,
    "72B": 72_706_203_648,
}


def test_every_size_has_the_published_number_of_parameters() -> None:
    assert {size: shape.num_parameters for size, shape in QWEN2_5.items()} == PUBLISHED


@pytest.mark.parametrize(
    ("path", "size"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "7B"),
        ("Qwen/Qwen2.5-0.5B", "0.5B"),
        ("models/qwen2.5-72b", "72B"),
        ("Qwen/Qwen2.5-70B", None),
        ("Qwen/Qwen3-14B", None),
        ("toy", None),
    ],
)
def test_the_size_is_read_from_the_name(path: str, size: str | None) -> None:
    assert size_in(path) == size
