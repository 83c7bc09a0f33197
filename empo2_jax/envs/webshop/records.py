"""Large JSON files read one record at a time, and records kept on disk that are read through a memory map.

The products of WebShop are one list of several gigabytes: neither reading nor opening may need them in memory. A
record in a kept file is one line of JSON; a second file holds where each begins. Nothing here knows what a record is.
"""

import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

import numpy as np

from empo2_jax.errors import DataError

CHUNK = 1 << 20  # characters read at a time
LARGEST = 1 << 24  # characters of one record at most

_SPACE = " \t\r\n"
_REST = 3  # characters behind a number that tell that it is complete ("1" of "1e+5")


class _Reader:
    """A window on a JSON text that moves on value by value."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path, self._file = path, file
        self._text, self._at, self._before, self._ended = "", 0, 0, False
        self._decoder = json.JSONDecoder()
        self.record = 0

    def sign(self) -> str:
        """The next character that is not space, "" at the end; it is not consumed."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._fill(CHUNK):
                return ""

    def take(self, allowed: str) -> str:
        """Consume the next character, which must be one of `allowed`."""
        sign = self.sign()
        if not sign or sign not in allowed:
            self.fail(f"{' or '.join(allowed)} is expected, found {sign or 'the end of the file'}")
        self._at += 1
        return sign

    def value(self) -> Any:
        """Consume the next value."""
        self.sign()
        size = CHUNK
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except (json.JSONDecodeError, RecursionError) as error:
                if len(self._text) - self._at > LARGEST or not self._fill(size):
                    self.fail(error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply")
                size *= 2
                continue
            if end + _REST > len(self._text) and not self._ended:  # a number may go on
                self._fill(size)
                continue
            self._at = end
            return value

    def fail(self, problem: str) -> NoReturn:
        """Raise `DataError` with the place."""
        place = self._before + self._at
        raise DataError(f"{self._path}: record {self.record}, character {place}: not valid JSON: {problem}")

    def _fill(self, size: int) -> bool:
        if self._ended:
            return False
        try:
            more = self._file.read(size)
        except UnicodeDecodeError as error:
            raise DataError(f"{self._path}: record {self.record}: not UTF-8 text: {error.reason}") from None
        self._before += self._at
        self._text, self._at = self._text[self._at :] + more, 0
        self._ended = not more
        return bool(more)


def items(path: Path) -> Iterator[Any]:
    """The elements of the JSON list in `path`, in order, with one in memory at a time.

    Raises:
        DataError: not a list, or not valid JSON; names the record (from 0) and the character.
    """
    with path.open(encoding="utf-8") as file:
        reader = _Reader(path, file)
        reader.take("[")
        if reader.sign() == "]":
            return
        while True:
            yield reader.value()
            reader.record += 1
            if reader.take(",]") == "]":
                return


def members(path: Path) -> Iterator[tuple[str, Any]]:
    """The (key, value) pairs of the JSON object in `path`, in order, with one in memory at a time.

    Raises:
        DataError: not an object, or not valid JSON; names the record (from 0) and the character.
    """
    with path.open(encoding="utf-8") as file:
        reader = _Reader(path, file)
        reader.take("{")
        if reader.sign() == "}":
            return
        while True:
            key = reader.value() if reader.sign() == '"' else reader.fail("a key is expected")
            reader.take(":")
            yield key, reader.value()
            reader.record += 1
            if reader.take(",}") == "}":
                return


class RecordWriter:
    """Writes records to `<path>.jsonl` and, when closed, their places to `<path>.npy`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.with_suffix(".jsonl").open("wb")
        self._places = array("q", [0])

    def add(self, record: Any) -> int:
        """Append a record; returns its number."""
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        self._file.write(line)
        self._places.append(self._places[-1] + len(line))
        return len(self._places) - 2

    def close(self) -> None:
        """Finish both files."""
        self._file.close()
        np.save(self._path.with_suffix(".npy"), np.asarray(self._places, np.int64))


class RecordFile(Sequence[Any]):
    """The records that a `RecordWriter` wrote, by number; safe to read from several threads."""

    def __init__(self, path: Path) -> None:
        self._places = np.load(path.with_suffix(".npy"), mmap_mode="r")
        lines = path.with_suffix(".jsonl")
        if lines.stat().st_size != int(self._places[-1]):
            raise DataError(f"{lines}: cut or changed; delete its folder, and it is made again")
        self._bytes = np.memmap(lines, np.uint8, "r") if len(self) else np.zeros(0, np.uint8)

    def __len__(self) -> int:
        return len(self._places) - 1

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return json.loads(self._bytes[self._places[number] : self._places[number + 1]].tobytes())
