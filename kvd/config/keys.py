"""The keys of the configuration as a flat table, and how their values are read and written.

A key is `section.name`. Its value is read from what TOML gave (typed) or from a text (environment,
command line), and written back as a text in the same notation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, cast

from pydantic import BaseModel

from kvd.config.model import Config
from kvd.core.units import format_duration, format_size, parse_duration, parse_size


@dataclass(frozen=True, slots=True)
class Key:
    """One thing that can be configured.

    kind:       how values are read: size, duration, count, optional_count, fraction, choice,
                text, flag, uids or names.
    rule:       the allowed values in words.
    reloadable: whether SIGHUP applies a change, or only a restart.
    at_limit:   for limits, what happens to the one that is too many; else empty.
    """

    section: str
    name: str
    kind: str
    rule: str
    reloadable: bool
    default: object
    description: str
    at_limit: str

    @property
    def path(self) -> str:
        """The name in files and on the command line: `pool.size`."""
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """The name in the environment: `KVD_POOL_SIZE`."""
        return f"KVD_{self.section}_{self.name}".upper()


def all_keys() -> tuple[Key, ...]:
    """Return every key, in the order of the models."""
    return tuple(
        _make_key(section, name)
        for section in Config.model_fields
        for name in section_model(section).model_fields
    )


def section_model(section: str) -> type[BaseModel]:
    """Return the model of a section; an unknown one is a bug and raises KeyError."""
    return cast(type[BaseModel], Config.model_fields[section].annotation)


def _make_key(section: str, name: str) -> Key:
    field = section_model(section).model_fields[name]
    extra = cast(dict[str, Any], field.json_schema_extra)
    return Key(
        section=section,
        name=name,
        kind=extra["kind"],
        rule=extra["rule"],
        reloadable=extra["reloadable"],
        default=field.default,
        description=field.description or "",
        at_limit=extra.get("at_limit", ""),
    )


def value_of(config: Config, key: Key) -> object:
    """Return the value that a configuration has for a key."""
    return cast(object, getattr(getattr(config, key.section), key.name))


def read_typed(key: Key, raw: object) -> object:
    """Read a value that TOML gave.

    Raises: ValueError: wrong type or no unit; says what to write.
    """
    wanted = _TYPES[key.kind]
    if key.kind in ("size", "duration"):
        if isinstance(raw, int | float) and not isinstance(raw, bool):
            example = "64GiB" if key.kind == "size" else "30s"
            raise ValueError(f'{raw} has no unit: write the unit, in quotes, e.g. "{example}"')
        return read_text(key, _typed(raw, str, wanted))
    if key.kind == "optional_count":
        word = raw if isinstance(raw, str) and raw in _WORDS_FOR_COUNT else ""
        return read_text(key, word) if word else _typed(raw, int, wanted)
    if key.kind == "count":
        return _typed(raw, int, wanted)
    if key.kind == "fraction":
        return float(raw) if type(raw) is int else _typed(raw, float, wanted)
    if key.kind == "flag":
        return _typed(raw, bool, wanted)
    if key.kind == "uids":
        return tuple(_typed(uid, int, wanted) for uid in _typed(raw, list, wanted))
    if key.kind == "names":
        return tuple(_typed(name, str, wanted) for name in _typed(raw, list, wanted))
    return _typed(raw, str, wanted)


def read_text(key: Key, text: str) -> object:
    """Read a value that the environment or the command line gave.

    Raises: ValueError: not of the key's kind; says what to write.
    """
    if key.kind == "size":
        return parse_size(text)
    if key.kind == "duration":
        return parse_duration(text)
    if key.kind == "flag":
        if text not in ("true", "false"):
            raise ValueError(f'"{text}" is neither true nor false')
        return text == "true"
    if key.kind == "optional_count" and text in _WORDS_FOR_COUNT:
        return None if text == "none" else text
    if key.kind in ("count", "optional_count"):
        return _read_int(text)
    if key.kind == "fraction":
        return _read_fraction(text)
    if key.kind in ("uids", "names"):
        parts = text.strip().removeprefix("[").removesuffix("]").split(",")
        given = [part.strip() for part in parts if part.strip() or len(parts) > 1]
        return tuple(_read_int(part) if key.kind == "uids" else part.strip('"') for part in given)
    return text


def write_text(key: Key, value: object) -> str:
    """Write a value so that `read_text` reads it back."""
    if key.kind == "size":
        return format_size(cast(int, value))
    if key.kind == "duration":
        return format_duration(cast(int, value))
    if key.kind in ("uids", "names"):
        return ",".join(str(one) for one in cast(tuple[object, ...], value))
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def write_toml(key: Key, value: object) -> str:
    """Write a value as TOML."""
    text = write_text(key, value)
    if key.kind == "uids":
        return f"[{text.replace(',', ', ')}]"
    if key.kind == "names":
        quoted = ", ".join(f'"{name}"' for name in cast(tuple[str, ...], value))
        return f"[{quoted}]"
    plain = ("count", "fraction", "flag")
    if key.kind in plain or (key.kind == "optional_count" and isinstance(value, int)):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


_WORDS_FOR_COUNT: Final = ("auto", "none")
_TYPES: Final = {
    "size": 'a size in quotes, e.g. "64GiB"',
    "duration": 'a duration in quotes, e.g. "30s"',
    "count": "a whole number",
    "optional_count": 'a whole number, "auto" or "none"',
    "fraction": "a number, e.g. 0.95",
    "choice": "a text in quotes",
    "text": "a text in quotes",
    "flag": "true or false",
    "uids": "a list of user ids, e.g. [1000]",
    "names": 'a list of names, e.g. ["local"]',
}
_TOML_NAMES: Final = {
    str: "a text",
    bool: "a boolean",
    int: "a whole number",
    float: "a fraction",
    list: "a list",
    dict: "a table",
}


def _typed(raw: object, kind: type[Any], wanted: str) -> Any:
    # bool is an int to Python, never to a reader of TOML
    if type(raw) is not kind:
        raise ValueError(f"expected {wanted}, got {_TOML_NAMES.get(type(raw), 'a date or time')}")
    return raw


def _read_int(text: str) -> int:
    digits = text.strip()
    if not digits.removeprefix("-").isascii() or not digits.removeprefix("-").isdecimal():
        raise ValueError(f'"{text}" is not a whole number')
    if len(digits) > 20:
        raise ValueError(f'"{text[:20]}..." is too large')
    return int(digits)


def _read_fraction(text: str) -> float:
    whole, point, part = text.strip().partition(".")
    digits = whole + part
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > 20:
        raise ValueError(f'"{text[:20]}" is not a number such as 0.95')
    return float(f"{whole or 0}{point}{part}")
