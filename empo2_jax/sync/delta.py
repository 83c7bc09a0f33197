"""Only what changed between two versions, and the receiver that puts versions together again.

At a learning rate of 1e-6 an update moves a few percent of the bf16 values, mostly by one unit in the last place. A
changed tensor becomes two parts: one bit per value, and the exclusive or of the values that changed; both compressed
(zlib). A tensor that this does not make smaller is stored whole. Applying a delta gives the bytes of the version
exactly; the manifest has their checksums. `empo2_jax.sync.orbax_publish` decides which versions are deltas.
"""

import itertools
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from safetensors import SafetensorError
from safetensors.numpy import load_file

from empo2_jax.errors import SyncError
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.sync.bundle import Bundle, lease, read_bundle
from empo2_jax.sync.manifest import latest, read_manifest
from empo2_jax.sync.tensor_file import Tensor, checksums, raw, spread

MASK, VALUES, WHOLE = ":mask", ":values", ":whole"
_LEVEL = 1  # of zlib: higher ones win 2 % and cost several times the time

Parts = dict[str, UInt8[np.ndarray, " bytes"]]


def encode(name: str, old: Tensor, new: Tensor) -> Parts:
    """Parts of one tensor's change, empty if nothing changed; both in the same shape and dtype."""
    before, after = _words(old), _words(new)
    changes = before ^ after
    mask = changes != 0
    if not mask.any():
        return {}
    parts = {name + MASK: _pack(np.packbits(mask)), name + VALUES: _pack(_planes(changes[mask]))}
    return parts if sum(part.size for part in parts.values()) < new.nbytes else {name + WHOLE: raw(new)}


def decode(name: str, old: Tensor, parts: Mapping[str, UInt8[np.ndarray, " bytes"]]) -> Tensor:
    """The new tensor; `old` itself if there is no part of that name.

    Raises:
        SyncError: the parts do not fit the tensor.
    """
    if name + WHOLE in parts:
        return parts[name + WHOLE].copy().view(old.dtype).reshape(old.shape)
    if name + MASK not in parts:
        return old
    words = _words(old).copy()
    try:
        bits = np.frombuffer(zlib.decompress(parts[name + MASK].data), np.uint8)
        mask = np.unpackbits(bits, count=words.size).astype(bool)
        planes = np.frombuffer(zlib.decompress(parts[name + VALUES].data), np.uint8)
        words[mask] ^= planes.reshape(words.itemsize, -1).T.copy().view(words.dtype)[:, 0]
    except (zlib.error, ValueError, KeyError) as error:
        raise SyncError(f"the delta of tensor {name} cannot be decoded: {error}") from error
    return words.view(old.dtype).reshape(old.shape)


def apply_delta(tensors: Mapping[str, Tensor], version: int, seal: str, delta: Bundle) -> dict[str, Tensor]:
    """Tensors of a delta's version from those of its parent.

    Args:
        tensors: All tensors of the version before.
        version: Its number.
        seal: The seal of its manifest.
        delta: What to apply.

    Raises:
        SyncError: the delta belongs to another version, or the result is not what was published.
    """
    wanted = delta.manifest.chained_to
    if wanted is None or (wanted.version, wanted.seal) != (version, seal):
        needs = "is not a delta" if wanted is None else f"needs version {wanted.version} ({wanted.seal[:8]})"
        raise SyncError(f"{delta.folder}: {needs}; there is version {version} ({seal[:8]})")
    result: dict[str, Tensor] = {}
    for file in sorted({entry.file for entry in delta.manifest.tensors.values()}):
        parts = _read_parts(delta.folder / file)
        names = [name for name, entry in delta.manifest.tensors.items() if entry.file == file]
        decoded = spread(decode, names, (tensors[name] for name in names), itertools.repeat(parts))
        result |= zip(names, decoded, strict=True)
    for name, checksum in checksums(result).items():
        if checksum != delta.manifest.tensors[name].checksum:
            raise SyncError(f"{delta.folder}: tensor {name} does not come out as published")
    return {name: result[name] for name in tensors}


class Receiver:
    """Holds the newest weights of one root in host memory and follows it, by deltas where they reach."""

    def __init__(self, root: Path, model_config: Qwen2Config) -> None:
        """Nothing is read yet."""
        self._root, self._config = Path(root), model_config
        self._seal: str | None = None
        self.version: int | None = None
        self.tensors: dict[str, Tensor] = {}

    def follow(self, version: int | None = None) -> dict[str, Tensor]:
        """All tensors of a version (None: the newest) in its dtype; verified to the last byte.

        Raises:
            SyncError: a link of the chain is missing or bad, by name; what is held stays a whole version.
        """
        if version is None and (newest := latest(self._root)) is not None:
            version = int(newest.name)
        if version is None:
            raise SyncError(f"{self._root}: no version is published")
        for link in self._chain(version):
            folder = self._root / str(link)
            with lease(folder):
                bundle = read_bundle(folder, self._config)
                if bundle.manifest.kind == "full":
                    tensors = {name: bundle.read(name) for name in bundle.manifest.tensors}
                else:
                    tensors = apply_delta(self.tensors, self.version or 0, self._seal or "", bundle)
            self.tensors, self.version, self._seal = tensors, bundle.version, bundle.manifest.seal
        return self.tensors

    def _chain(self, version: int) -> list[int]:
        """Versions to read, oldest first, to get from what is held to `version`."""
        chain: list[int] = []
        held = (self.version, self._seal)
        number, seal = version, None
        while True:
            folder = self._root / str(number)
            if not folder.is_dir():
                why = f"; version {chain[-1]} is a delta on it" if chain else ""
                raise SyncError(f"{folder}: no such version{why}")
            manifest = read_manifest(folder)
            if seal not in (None, manifest.seal):
                raise SyncError(f"{folder}: not the version {number} that the delta {chain[-1]} was made from")
            if (number, manifest.seal) == held:
                break
            chain.append(number)
            parent = manifest.chained_to
            if parent is None or (parent.version, parent.seal) == held:
                break
            number, seal = parent.version, parent.seal
        return chain[::-1]


def _words(tensor: Tensor) -> Tensor:
    return raw(tensor).view(f"u{tensor.itemsize}")


def _pack(data: Tensor) -> UInt8[np.ndarray, " bytes"]:
    return np.frombuffer(zlib.compress(data.data, _LEVEL), np.uint8)


def _planes(words: Tensor) -> Tensor:
    """First bytes of all words, then second bytes, …: most of a change is in the lowest."""
    return words.view(np.uint8).reshape(-1, words.itemsize).T.copy()


def _read_parts(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise SyncError(f"{path}: cannot be read: {error}") from error
