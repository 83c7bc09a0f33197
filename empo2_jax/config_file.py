"""Configurations as TOML: files with the presets they extend, overrides of the command line, and the resolved text."""

import json
import tomllib
from pathlib import Path
from typing import Any

from empo2_jax.config import Config, EvaluationConfig, parse_config
from empo2_jax.errors import ConfigError
from empo2_jax.panels import load_panel
from empo2_jax.readers import read_toml


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read a TOML file with its presets, apply `section.key=value` overrides, validate."""
    changes: dict[str, Any] = {}
    for text in overrides:
        keys, value = parse_override(text)
        nested: Any = value
        for key in reversed(keys):
            nested = {key: nested}
        changes = merge(changes, nested)
    _apply_panel(changes, Path(), "overrides")
    return parse_config(_layer(_read(Path(path)), changes, "overrides"), str(path))


def parse_override(text: str) -> tuple[list[str], Any]:
    """`section.key=value` with the value in TOML syntax; bare words are text."""
    key, separator, raw = text.partition("=")
    if not separator:
        raise ConfigError(f"override `{text}`: section.key=value is expected")
    try:
        value = tomllib.loads(f"v = {raw}")["v"]
    except (ValueError, RecursionError):
        value = raw
    return key.strip().split("."), value


def use_panel(config: Config, panel: Path) -> Config:
    """`config` evaluated on another panel."""
    values: dict[str, Any] = {"evaluation": {"every": config.evaluation.every, "panel": str(panel)}}
    _apply_panel(values, Path(), "evaluate")
    return config.model_copy(update={"evaluation": EvaluationConfig.model_validate(values["evaluation"])})


def dump_toml(config: Config) -> str:
    """The resolved configuration as TOML, every key spelled out."""
    lines = []
    for name, section in config:
        lines.append(f"[{name}]")
        for key, value in section:
            lines.append(f"{key} = {_toml_value(value)}")
        lines.append("")
    return "\n".join(lines)


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path.is_dir():
        example = "".join(f", for example {file}" for file in sorted(path.glob("*.toml"))[:1])
        raise ConfigError(f"{path}: a folder, not a configuration; a TOML file is allowed{example}")
    if not path.is_file():
        raise ConfigError(f"{path}: no such configuration file")
    if path.resolve() in seen:
        raise ConfigError(f"{path}: `extends` runs in a circle")
    values = read_toml(path)
    parent = values.pop("extends", None)
    _apply_panel(values, path.parent, str(path))
    parents = [parent] if isinstance(parent, str) else [] if parent is None else parent
    if not isinstance(parents, list) or not all(isinstance(name, str) for name in parents):
        raise ConfigError(f"{path}: extends = {parent!r}: a file name or a list of them is allowed")
    base: dict[str, Any] = {}
    for name in parents:
        base = _layer(base, _read(path.parent / name, (*seen, path.resolve())), str(path))
    return _layer(base, values, str(path))


def _apply_panel(values: dict[str, Any], folder: Path, source: str) -> None:
    """Fill in what the panel of `[evaluation]` fixes; its path becomes absolute, for the copy in a run directory."""
    section = values.get("evaluation")
    panel = section.get("panel") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(panel, str) or not panel:
        return
    place = (folder / panel).resolve()
    section["panel"] = str(place)
    for key, figure in load_panel(place).figures().items():
        if section.setdefault(key, figure) != figure:
            raise ConfigError(
                f"{source}: evaluation.{key} = {section[key]!r} contradicts the panel {place.name}, which says {figure}"
            )


def _layer(base: dict[str, Any], over: dict[str, Any], source: str) -> dict[str, Any]:
    """`over` on `base`. A panel in `over` replaces what `base` says; one in `base` must not be contradicted."""
    merged = merge(base, over)
    section = over.get("evaluation")
    if isinstance(section, dict) and "panel" not in section:
        _apply_panel(merged, Path(), source)
    return merged


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on `base`, table by table and key by key; neither is changed."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return repr(value)
