"""Full-text search over the products: BM25 with English stemming and stop words, on disk and memory-mapped (tantivy).

The original used Lucene with k1 0.9 and b 0.4. The engine here has k1 1.2 and b 0.75 built in, so the order of results
differs from the original's; which products are found does not differ much. Queries are words, never a query language.
"""

from importlib.metadata import version
from pathlib import Path

import tantivy

from empo2_jax.errors import DataError

HITS = 50  # results of a search, as in the original
WORDS = 64  # of a query that count
VERSION = f"tantivy-{version('tantivy')}"
HEAP = 128 << 20  # bytes that the index writer collects before it writes a part

_ANALYZER = "english"


def _analyzer() -> tantivy.TextAnalyzer:
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    filters = (
        tantivy.Filter.remove_long(40),
        tantivy.Filter.lowercase(),
        tantivy.Filter.stopword("english"),
        tantivy.Filter.stemmer("english"),
    )
    for item in filters:
        builder = builder.filter(item)
    return builder.build()


class IndexWriter:
    """Builds an index in a new folder; memory stays near `HEAP` whatever the number of texts."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        schema = tantivy.SchemaBuilder()
        schema.add_text_field("text", tokenizer_name=_ANALYZER, index_option="freq")
        schema.add_integer_field("number", fast=True)
        self._index = tantivy.Index(schema.build(), str(folder))
        self._index.register_tokenizer(_ANALYZER, _analyzer())
        self._writer = self._index.writer(heap_size=HEAP, num_threads=1)

    def add(self, number: int, text: str) -> None:
        """Index a text under a number."""
        self._writer.add_document(tantivy.Document(text=text, number=number))

    def close(self) -> None:
        """Write what is left and wait for the parts to be merged."""
        self._writer.commit()
        self._writer.wait_merging_threads()


class SearchIndex:
    """An index opened for reading; safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        try:
            self._index = tantivy.Index.open(str(folder))
        except ValueError as error:
            raise DataError(f"{folder}: {error}; delete the folder above it, and it is made again") from None
        self._index.register_tokenizer(_ANALYZER, _analyzer())
        self._analyzer = _analyzer()
        self._searcher = self._index.searcher()

    def __len__(self) -> int:
        return self._searcher.num_docs

    def search(self, text: str, count: int = HITS) -> list[int]:
        """Numbers of the best `count` texts that hold a word of `text`; ties by number. [] where nothing matches."""
        words = self.words(text)
        if not words:
            return []
        terms = [tantivy.Query.term_query(self._index.schema, "text", word) for word in words]
        query = tantivy.Query.boolean_query([(tantivy.Occur.Should, term) for term in terms])
        hits = self._searcher.search(query, count, count=False).hits
        numbers = self._searcher.fast_field_values("number", [address for _, address in hits])
        ranked = sorted((-score, int(number or 0)) for (score, _), number in zip(hits, numbers, strict=True))
        return [number for _, number in ranked]

    def words(self, text: str) -> list[str]:
        """The distinct stems of a query, the first `WORDS` of them."""
        return list(dict.fromkeys(self._analyzer.analyze(text)))[:WORDS]
