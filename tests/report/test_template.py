"""Templates: nothing is left empty silently; that text stays text is tested with the pages."""

import jinja2
import pytest

from empo2_jax.report.template import filled


def test_a_value_that_is_missing_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError, match="'about' is undefined"):
        filled("empo2_jax.study", "study.html.jinja", title="x")
