"""WebShop: shopping for an instruction in a store of up to 1.18 million products (the paper's second environment).

A modern implementation of its own that reads the original's data files; `family` is the entry. Reward and page flow are
as published, the order of search results and the nouns of titles are not exactly the original's (docs/webshop.md).
Without a data folder a small synthetic catalogue stands in.
"""

import difflib
import logging
from collections.abc import Sequence
from pathlib import Path

from empo2_jax.config import EnvConfig
from empo2_jax.envs.webshop import synthetic
from empo2_jax.envs.webshop.catalogue import Catalogue, open_catalogue
from empo2_jax.envs.webshop.environment import WebShopEnvironment
from empo2_jax.envs.webshop.goals import KINDS, ORDERS
from empo2_jax.envs.webshop.nouns import extractor
from empo2_jax.envs.webshop.webshop_family import WebShopFamily
from empo2_jax.errors import GUIDE, ConfigError

__all__ = ["WebShopEnvironment", "WebShopFamily", "family", "from_config"]

_log = logging.getLogger(__name__)
TASKS = tuple(kind + order for kind in KINDS for order in ORDERS)


def family(
    *,
    data: str | Path = "",
    products: int = synthetic.DEFAULT_COUNT,
    tasks: Sequence[str] = (),
    train: int | None = None,
    panel: int | None = None,
    penalty: float = 0.0,
    nouns: str = "rules",
    readable: bool = False,
) -> WebShopFamily:
    """WebShop on some data; builds the catalogue if it is not in the cache.

    Args:
        data: Folder of the data files, or one product file in it; "" for the synthetic catalogue.
        products: Of the synthetic catalogue.
        tasks: Kinds of goals, of `TASKS`; none: human ones if there are any, else synthetic ones.
        train: Goals of each kind that are trained on; None: all of the train split.
        panel: Goals of each kind in the dev and test splits; None: all.
        penalty: Points off the reward (not the score) for an action that the shop refuses.
        nouns: "rules", or "spacy" as in the original.
        readable: Show pages with one string a line instead of the original's separators.

    Raises:
        ConfigError: unknown tasks, no goals of a kind, missing files.
        DataError: a record of the data that cannot be read.
    """
    if not data:
        _log.warning("webshop: no data folder given: a synthetic catalogue is used; %ssynthetic-catalogue", GUIDE)
    catalogue = open_catalogue(Path(data) if data else synthetic.ensure(products))
    names = tuple(dict.fromkeys(tasks)) or (("human",) if catalogue.counts.human else ("synthetic",))
    _check(names, catalogue)
    goals = {name: catalogue.goals(name) for name in names}
    return WebShopFamily(
        catalogue, goals, extractor(nouns), train=train, panel=panel, penalty=penalty, readable=readable
    )


def from_config(config: EnvConfig, *, panel: int, workers: int) -> WebShopFamily:
    """The family that `[env]` describes; `workers` does not matter: shoppers share one catalogue and cost nothing."""
    return family(
        data=config.data,
        products=config.products,
        tasks=config.tasks,
        train=config.train_variations,
        panel=panel,
        penalty=config.invalid_penalty,
        nouns=config.nouns,
    )


def _check(names: Sequence[str], catalogue: Catalogue) -> None:
    for name in names:
        if name not in TASKS:
            near = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.0)[0]
            raise ConfigError(f"env.tasks: webshop has no goals {name!r}; the nearest is {near!r}")
        if not (catalogue.counts.human if name.startswith("human") else catalogue.counts.synthetic):
            raise ConfigError(f"env.tasks: the data has no {name} goals ({catalogue.folder})")
    kinds = [name.partition("-")[0] for name in names]
    if len(set(kinds)) < len(kinds):
        raise ConfigError(f"env.tasks = {list(names)}: the same goals in two orders would be in two splits at once")
