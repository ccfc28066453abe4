"""Read the configuration: command line over environment over file over defaults.

Every value that was given is checked, also one that a stronger source replaces, and everything
wrong is reported at once: one line each, with the dotted path, what is allowed, and where the value
came from.
"""

from __future__ import annotations

import difflib
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pydantic import ValidationError

from kvd.config.checks import cross_check
from kvd.config.keys import (
    Key,
    all_keys,
    read_text,
    read_typed,
    section_model,
    value_of,
    write_text,
)
from kvd.config.model import Config
from kvd.core.errors import ConfigError

DEFAULT_PATH: Final = Path("/etc/kvd/kvd.toml")
RUNTIME_DIR_VARIABLE: Final = "KVD_RUNTIME_DIR"

_FILE_BYTES_MAX: Final = 1 << 20
_SECTION_LINE: Final = re.compile(r"\s*\[\s*([A-Za-z0-9_-]+)\s*\]")
_KEY_LINE: Final = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*=")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A valid configuration, and for each key (`pool.size`) where its value came from."""

    config: Config
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ConfigRow:
    """One line of `kvctl config`; value is written as in a flag, without quotes."""

    key: str
    value: str
    origin: str
    reloadable: bool
    description: str


@dataclass(frozen=True, slots=True)
class Reload:
    """What a reload does.

    loaded:          the configuration to run with from now on.
    applied:         key -> (old, new) of what takes effect now, as texts.
    pending_restart: key -> (old, new) of what takes effect at the next start only.
    """

    loaded: LoadedConfig
    applied: Mapping[str, tuple[str, str]]
    pending_restart: Mapping[str, tuple[str, str]]


@dataclass(slots=True)
class _Gathered:
    """What has been read so far; later sources replace the values of earlier ones."""

    keys: Mapping[str, Key]
    values: dict[str, object] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def take(self, path: str, raw: object, origin: str, *, textual: bool) -> None:
        """Read and check one value, given as text or as a TOML value."""
        key = self.keys[path]
        try:
            value = read_text(key, str(raw)) if textual else read_typed(key, raw)
            section_model(key.section).model_validate({key.name: value})
        except ValidationError:
            shown = _clipped(write_text(key, value))
            self._refuse(path, f'"{shown}" is not allowed: must be {key.rule}', origin)
        except ValueError as error:
            self._refuse(path, f"{error}; allowed: {key.rule}", origin)
        else:
            self.values[path] = value
            self.origins[path] = origin

    def unknown(self, path: str, origin: str) -> None:
        """Report a key that does not exist, with the nearest one that does."""
        section, _, name = path.rpartition(".")
        siblings = {key.name: key.path for key in self.keys.values() if key.section == section}
        moved = [key.path for key in self.keys.values() if key.name == name]
        near = moved or [siblings[match] for match in _nearest(name, list(siblings))]
        near = near or ([] if siblings else _nearest(path, list(self.keys), 0.75))
        known = ", ".join(siblings.values() or Config.model_fields)
        hint = f"did you mean {near[0]}?" if near else f"known are {known}"
        self.problems.append(f"{path}: unknown key; {hint} ({origin})")

    def _refuse(self, path: str, what: str, origin: str) -> None:
        self.problems.append(f"{path}: {what} ({origin})")
        self.wrong.add(path)


def load_config(
    path: Path | None,
    env: Mapping[str, str],
    flags: Mapping[str, str],
    *,
    default_path: Path = DEFAULT_PATH,
) -> LoadedConfig:
    """Read and check the configuration; changes nothing and logs nothing.

    Args:
        path: the file to read; None reads default_path when it exists, and no file otherwise.
        env: environment; `KVD_<SECTION>_<KEY>` sets a key, KVD_RUNTIME_DIR sets
            server.runtime_dir, other variables are ignored unless they look like a misspelt one.
        flags: key -> text, from the command line (`--set pool.size=64GiB`).
        default_path: where a file is looked for when none is named.

    Raises: ConfigError: anything wrong; `problems` has one line for each thing.
    """
    gathered = _Gathered({key.path: key for key in all_keys()})
    if path is not None or default_path.exists():
        _take_file(gathered, path or default_path)
    _take_env(gathered, env)
    for name, text in flags.items():
        origin = f"flag --set {name}"
        if name in gathered.keys:
            gathered.take(name, text, origin, textual=True)
        else:
            gathered.unknown(name, origin)
    config = _build(gathered)
    gathered.problems.extend(cross_check(config, gathered.wrong))
    if gathered.problems:
        raise ConfigError([_one_line(problem) for problem in gathered.problems])
    origins = {key: gathered.origins.get(key, "default") for key in gathered.keys}
    return LoadedConfig(config, MappingProxyType(origins))


def describe(loaded: LoadedConfig) -> list[ConfigRow]:
    """Return one row for each key, in the order of the models."""
    return [
        ConfigRow(
            key=key.path,
            value=write_text(key, value_of(loaded.config, key)),
            origin=loaded.origins[key.path],
            reloadable=key.reloadable,
            description=key.description,
        )
        for key in all_keys()
    ]


def plan_reload(running: LoadedConfig, fresh: LoadedConfig) -> Reload:
    """Take from a freshly read configuration what may change while the daemon runs.

    Args:
        running: what the daemon runs with.
        fresh: what `load_config` returned just now.

    Returns: running with the reloadable keys of fresh; the rest of the difference is pending.
    """
    sections: dict[str, dict[str, object]] = {}
    origins: dict[str, str] = {}
    applied: dict[str, tuple[str, str]] = {}
    pending: dict[str, tuple[str, str]] = {}
    for key in all_keys():
        old, new = value_of(running.config, key), value_of(fresh.config, key)
        source = fresh if key.reloadable else running
        sections.setdefault(key.section, {})[key.name] = value_of(source.config, key)
        origins[key.path] = source.origins[key.path]
        if old != new:
            changes = applied if key.reloadable else pending
            changes[key.path] = (write_text(key, old), write_text(key, new))
    config = Config.model_validate(sections)
    return Reload(
        LoadedConfig(config, MappingProxyType(origins)),
        MappingProxyType(applied),
        MappingProxyType(pending),
    )


def _build(gathered: _Gathered) -> Config:
    sections: dict[str, dict[str, object]] = {}
    for path, value in gathered.values.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, {})[name] = value
    return Config.model_validate(sections)


def _take_file(gathered: _Gathered, path: Path) -> None:
    try:
        text = _read_file(path)
        document = tomllib.loads(text)
    except OSError as error:
        gathered.problems.append(f"{path}: cannot be read: {error.strerror or error}")
        return
    except tomllib.TOMLDecodeError as error:
        gathered.problems.append(f"{path}: is not TOML: {error}")
        return
    except ValueError as error:
        gathered.problems.append(f"{path}: {error}")
        return
    lines = _line_numbers(text)
    for section, body in document.items():
        origin = _file_origin(path, lines, section)
        if section not in Config.model_fields:
            _unknown_section(gathered, section, origin)
        elif not isinstance(body, dict):
            gathered.problems.append(
                f"{section}: is a section: write [{section}] and its keys below it ({origin})"
            )
        else:
            for name, raw in body.items():
                key = f"{section}.{name}"
                origin = _file_origin(path, lines, key)
                if key in gathered.keys:
                    gathered.take(key, raw, origin, textual=False)
                else:
                    gathered.unknown(key, origin)


def _read_file(path: Path) -> str:
    # A FIFO would block the start for ever, a device could feed it without end.
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("is not a regular file")
    if status.st_size > _FILE_BYTES_MAX:
        raise ValueError(f"has {status.st_size} bytes, over the limit of {_FILE_BYTES_MAX}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 at byte {error.start}") from error


def _file_origin(path: Path, lines: Mapping[str, int], key: str) -> str:
    line = lines.get(key) or lines.get(key.partition(".")[0])
    return f"file {path}:{line}" if line else f"file {path}"


def _line_numbers(text: str) -> dict[str, int]:
    """Map sections and dotted keys to lines, as well as a scan can (tomllib keeps no positions)."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if (header := _SECTION_LINE.match(line)) is not None:
            section = header[1]
            lines.setdefault(section, number)
        elif (key := _KEY_LINE.match(line)) is not None:
            lines.setdefault(f"{section}.{key[1]}" if section else key[1], number)
    return lines


def _unknown_section(gathered: _Gathered, section: str, origin: str) -> None:
    known = list(Config.model_fields)
    near = _nearest(section, known)
    moved = [path for path in gathered.keys if path.endswith(f".{section}")]
    if near:
        hint = f"did you mean [{near[0]}]?"
    elif moved:
        hint = f"did you mean {moved[0]}?"
    else:
        hint = f"known are {', '.join(known)}"
    gathered.problems.append(f"{section}: unknown section; {hint} ({origin})")


def _take_env(gathered: _Gathered, env: Mapping[str, str]) -> None:
    paths = {key.variable: path for path, key in gathered.keys.items()}
    paths[RUNTIME_DIR_VARIABLE] = "server.runtime_dir"
    given = {name: text for name, text in sorted(env.items()) if name.startswith("KVD_")}
    for name, text in given.items():
        if name in paths:
            gathered.take(paths[name], text, f"env {name}", textual=True)
    gathered.problems.extend(_misspelt_variables(given, list(paths)))
    twice = [name for name in ("KVD_SERVER_RUNTIME_DIR", RUNTIME_DIR_VARIABLE) if name in given]
    if len(twice) == 2 and given[twice[0]] != given[twice[1]]:
        gathered.problems.append(
            f"server.runtime_dir: {twice[0]} and {twice[1]} differ: set only one of them"
        )


def _misspelt_variables(given: Mapping[str, Any], known: list[str]) -> Iterator[str]:
    """Name variables that address a section but no key, or that nearly address a key."""
    sections = tuple(f"KVD_{section.upper()}_" for section in Config.model_fields)
    for name in given:
        if name in known:
            continue
        addressed = name.startswith(sections)
        # Others own variables named KVD_*, so that without a section only a near miss is wrong.
        near = _nearest(name, known, 0.6 if addressed else 0.85)
        if near or addressed:
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"{name}: unknown environment variable{hint} (env {name})"


def _clipped(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _one_line(text: str) -> str:
    """Keep a problem on its line, whatever a name or a value holds."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _nearest(name: str, choices: list[str], cutoff: float = 0.6) -> list[str]:
    return difflib.get_close_matches(name, choices, n=1, cutoff=cutoff)
