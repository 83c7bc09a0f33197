"""HTML templates filled with values: text is never markup, and a name that is missing is an error."""

from typing import Any

import jinja2


def filled(package: str, name: str, /, **values: Any) -> str:
    """The template `name` in the folder of a package, filled with `values`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package, "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(values)
