"""Makers of configuration fields: each field knows its unit, its range and when it takes effect.

A field of the models is a pydantic field whose `json_schema_extra` holds what the loader, the
template and `kvctl config` need: `kind`, `rule` (the allowed values in words), `reloadable` and,
for limits, `at_limit`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from pydantic import Field

from kvd.core.units import format_duration, format_size, parse_duration, parse_size

Bytes: TypeAlias = int
"""A number of bytes; written with its unit in files: `64GiB`."""

Nanoseconds: TypeAlias = int
"""A number of nanoseconds; written with its unit in files: `30s`."""


def size_field(
    default: str, low: str, high: str, description: str, *, reloadable: bool = False
) -> Any:
    """Make a field of bytes; default and bounds (inclusive) are texts with a unit."""
    lowest, highest = parse_size(low), parse_size(high)
    return Field(
        default=parse_size(default),
        ge=lowest,
        le=highest,
        description=description,
        json_schema_extra={
            "kind": "size",
            "rule": f"between {format_size(lowest)} and {format_size(highest)}",
            "reloadable": reloadable,
        },
    )


def duration_field(
    default: str, low: str, high: str, description: str, *, reloadable: bool = False
) -> Any:
    """Make a field of nanoseconds; default and bounds (inclusive) are texts with a unit."""
    lowest, highest = parse_duration(low), parse_duration(high)
    return Field(
        default=parse_duration(default),
        ge=lowest,
        le=highest,
        description=description,
        json_schema_extra={
            "kind": "duration",
            "rule": f"between {format_duration(lowest)} and {format_duration(highest)}",
            "reloadable": reloadable,
        },
    )


def count_field(
    default: int,
    low: int,
    high: int,
    description: str,
    *,
    at_limit: str = "",
    reloadable: bool = False,
) -> Any:
    """Make a field that counts things, low <= value <= high.

    Args: at_limit: for limits, what happens to the one that is too many.
    """
    return Field(
        default=default,
        ge=low,
        le=high,
        description=f"{description} {at_limit}".rstrip(),
        json_schema_extra={
            "kind": "count",
            "rule": f"between {low} and {high}",
            "reloadable": reloadable,
            "at_limit": at_limit,
        },
    )


def fraction_field(
    default: float, low: float, high: float, description: str, *, reloadable: bool = False
) -> Any:
    """Make a field that is a share of something, low <= value <= high."""
    return Field(
        default=default,
        ge=low,
        le=high,
        description=description,
        json_schema_extra={
            "kind": "fraction",
            "rule": f"between {low} and {high}",
            "reloadable": reloadable,
        },
    )


def choice_field(default: str, choices: str, description: str, *, reloadable: bool = False) -> Any:
    """Make a field whose annotation is a Literal; choices are its values, parted by blanks."""
    return Field(
        default=default,
        description=description,
        json_schema_extra={
            "kind": "choice",
            "rule": "one of " + ", ".join(choices.split()),
            "reloadable": reloadable,
        },
    )


def text_field(
    default: str, pattern: str, rule: str, description: str, *, reloadable: bool = False
) -> Any:
    """Make a text field that matches a pattern; rule says the same in words."""
    return Field(
        default=default,
        pattern=pattern,
        description=description,
        json_schema_extra={"kind": "text", "rule": rule, "reloadable": reloadable},
    )


def flag_field(default: bool, description: str, *, reloadable: bool = False) -> Any:
    """Make a field that is on or off."""
    return Field(
        default=default,
        description=description,
        json_schema_extra={"kind": "flag", "rule": "true or false", "reloadable": reloadable},
    )
