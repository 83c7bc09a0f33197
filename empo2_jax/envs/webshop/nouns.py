"""The nouns of a product title, on which the type part of the reward rests.

The original asks a large spaCy model. `rules` needs nothing: titles are mostly names of things and brands, so every
word counts that is not a function word, a number or measure, or an adjective or adverb by list or ending. The two
agree on most titles and not on all, hence rewards differ: which one is used is a setting and is logged.
"""

import functools
import importlib
import logging
import re
from collections.abc import Callable

from empo2_jax.errors import GUIDE, ConfigError

_log = logging.getLogger(__name__)
Nouns = Callable[[str], list[str]]  # lower-case nouns of a title, with repetitions

SPACY_MODEL = "en_core_web_lg"

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_FUNCTION_WORDS = (
    "a about above after all an and any are as at be both but by can could do does each either every few for from "
    "had has have he her his how i if in into is it its just many may me more most my new no nor not of off on one "
    "only or other our out over per several she should so some such than that the their them then these they this "
    "those to too under up us very was we were what when where which who will with within without would yes you "
    "your"
)
_MEASURES = "cm mm ft oz lb lbs kg g ml l w v mah ghz hz gb tb mb x xl xxl xs s m"
_ADJECTIVES = (
    "adult big black blue bright brown casual classic clean clear cold comfortable cool cozy cute dark dead dry "
    "easy elegant fat fine flat free fresh full gluten gray great green grey handmade happy hard heavy high hot "
    "ideal kosher large light little long loose low lightweight male female medium mini modern multi natural nice "
    "organic orange perfect pink plus portable pure purple quick real red rich round royal sexy sharp short single "
    "slim small smart smooth soft solid strong super sweet tall thick thin tiny top true ultra vegan vintage warm "
    "waterproof wet white wide wireless yellow young"
)
_NOT_NOUNS = frozenset(" ".join([_FUNCTION_WORDS, _MEASURES, _ADJECTIVES]).split())
_ENDINGS = ("ly", "ful", "less", "ous", "ible", "able", "ive", "ish")


def rules(title: str) -> list[str]:
    """Nouns by rule, see the module."""
    words = (word.lower().removesuffix("'s").removesuffix("’s") for word in _WORD.findall(title))
    return [word for word in words if _may_be_noun(word)]


def _may_be_noun(word: str) -> bool:
    if len(word) < 2 or word in _NOT_NOUNS:
        return False
    return not (len(word) > 5 and word.endswith(_ENDINGS))


def extractor(name: str) -> Nouns:
    """The extractor "rules" or "spacy", with a cache over titles; says which one is used in the log.

    Raises:
        ConfigError: spaCy or its model is not installed.
    """
    if name == "rules":
        _log.warning("webshop: nouns of titles by rule, not by spaCy: some rewards differ; %snouns-by-rule", GUIDE)
        return functools.lru_cache(1 << 16)(rules)
    try:
        model = importlib.import_module("spacy").load(SPACY_MODEL)
    except (ModuleNotFoundError, OSError):
        raise ConfigError(
            f'env.nouns = "spacy" needs spaCy with its model {SPACY_MODEL}; "rules" needs nothing'
        ) from None

    def tagged(title: str) -> list[str]:
        return [token.text.lower() for token in model(title) if token.pos_ in ("NOUN", "PROPN")]

    return functools.lru_cache(1 << 16)(tagged)
