"""Sizes and durations as people write them, and the integers that kvd computes with.

A size is a number of bytes, a duration a number of nanoseconds; both are plain `int`. In text each
carries its unit, always: `64GiB`, `30s`. A number without one is refused, since the reader and the
writer of `timeout = 30` seldom mean the same.
"""

from __future__ import annotations

import re
from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40
US_NS: Final = 1_000
MS_NS: Final = 1_000_000
SECOND_NS: Final = 1_000_000_000

# Sizes and durations travel as signed 64-bit integers (off_t, clock values).
_VALUE_MAX: Final = (1 << 63) - 1

# Largest first, so that the formatters prefer the larger of two equally short texts.
_SIZE_UNITS: Final = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("B", 1))
_DURATION_UNITS: Final = (
    ("h", 3600 * SECOND_NS),
    ("min", 60 * SECOND_NS),
    ("s", SECOND_NS),
    ("ms", MS_NS),
    ("us", US_NS),
    ("ns", 1),
)
# Spellings that people try, and what to write instead.
_SIZE_MISSPELT: Final = (
    ("TiB", ("T", "TB", "TIB")),
    ("GiB", ("G", "GB", "GIB")),
    ("MiB", ("M", "MB", "MIB")),
    ("KiB", ("K", "KB", "KIB")),
    ("B", ("BYTE", "BYTES")),
)
_DURATION_MISSPELT: Final = (
    ("h", ("H", "HR", "HOUR", "HOURS")),
    ("min", ("M", "MIN", "MINS", "MINUTE", "MINUTES")),
    ("s", ("S", "SEC", "SECS", "SECOND", "SECONDS")),
    ("ms", ("MS", "MSEC", "MILLIS")),
    ("us", ("US", "USEC", "MICROS")),
    ("ns", ("NS", "NSEC", "NANOS")),
)
_NUMBER: Final = re.compile(r"([0-9]{1,20})(?:\.([0-9]{1,40}))?[ ]?([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Read a size such as `64GiB`, `1.5MiB` or `0B`.

    Returns: bytes, 0 .. 2^63 - 1.
    Raises: ValueError: no unit, a decimal unit (`GB`), not a number, not a whole number of bytes,
        or too large; the sentence says what to write instead.
    """
    return _parse(text, "size", "64GiB", _SIZE_UNITS, _SIZE_MISSPELT)


def parse_duration(text: str) -> int:
    """Read a duration such as `200ms`, `30s`, `10min` or `1.5h`.

    Returns: nanoseconds, 0 .. 2^63 - 1.
    Raises: ValueError: no unit, an unknown one, not a number, not a whole number of nanoseconds,
        or too large; the sentence says what to write instead.
    """
    return _parse(text, "duration", "30s", _DURATION_UNITS, _DURATION_MISSPELT)


def format_size(num_bytes: int) -> str:
    """Write a size exactly, in the shortest way that `parse_size` reads back.

    Args: num_bytes: 0 .. 2^63 - 1.
    Raises: ValueError: outside of that range.
    """
    _check_value("size", num_bytes)
    if num_bytes == 0:
        return "0B"
    texts = (
        _exact_decimal(num_bytes, unit) + name for name, unit in _SIZE_UNITS if unit <= num_bytes
    )
    return min(texts, key=len)


def format_duration(num_ns: int) -> str:
    """Write a duration exactly, as a whole number of the largest unit that divides it.

    Args: num_ns: nanoseconds, 0 .. 2^63 - 1.
    Raises: ValueError: outside of that range.
    """
    _check_value("duration", num_ns)
    if num_ns == 0:
        return "0s"
    name, unit = next((name, unit) for name, unit in _DURATION_UNITS if num_ns % unit == 0)
    return f"{num_ns // unit}{name}"


def div_ceil(value: int, divisor: int) -> int:
    """Return value / divisor rounded up. Both are integers, divisor is positive."""
    if divisor <= 0:
        raise ValueError(f"divisor must be positive, got {divisor}")
    return -(-value // divisor)


def align_up(value: int, alignment: int) -> int:
    """Return the smallest multiple of alignment (positive) that is not below value."""
    return div_ceil(value, alignment) * alignment


def align_down(value: int, alignment: int) -> int:
    """Return the largest multiple of alignment (positive) that is not above value."""
    if alignment <= 0:
        raise ValueError(f"alignment must be positive, got {alignment}")
    return value // alignment * alignment


def _parse(
    text: str,
    kind: str,
    example: str,
    units: tuple[tuple[str, int], ...],
    misspelt: tuple[tuple[str, tuple[str, ...]], ...],
) -> int:
    match = _NUMBER.fullmatch(text.strip())
    shown = _shown(text)
    if match is None:
        raise ValueError(f'{shown} is not a {kind}: write a number and its unit, e.g. "{example}"')
    whole, fraction, suffix = str(match[1]), str(match[2] or ""), str(match[3])
    if not suffix:
        raise ValueError(f'{shown} has no unit: write the unit, e.g. "{example}"')
    unit = dict(units).get(suffix)
    if unit is None:
        right = next((name for name, wrong in misspelt if suffix.upper() in wrong), None)
        choices = ", ".join(name for name, _ in reversed(units))
        remedy = f"write {right}" if right else f"use one of {choices}"
        raise ValueError(f"{shown} has the unknown unit {suffix}: {remedy}")
    scale: int = 10 ** len(fraction)
    value, rest = divmod(int(whole + fraction) * unit, scale)
    if rest:
        raise ValueError(f"{shown} is not a whole number of {units[-1][0]}: use a smaller unit")
    if value > _VALUE_MAX:
        raise ValueError(f"{shown} is too large: the largest {kind} is 2^63 - 1 {units[-1][0]}")
    return value


def _shown(text: str) -> str:
    """Quote what somebody wrote so that a sentence about it stays one readable line."""
    clipped = text if len(text) <= 40 else text[:37] + "..."
    return '"' + "".join(c if c.isprintable() else "?" for c in clipped) + '"'


def _check_value(kind: str, value: int) -> None:
    if not 0 <= value <= _VALUE_MAX:
        raise ValueError(f"a {kind} must be between 0 and 2^63 - 1, got {value}")


def _exact_decimal(value: int, unit: int) -> str:
    """Write value / unit, where unit is a power of two, as a decimal that loses nothing."""
    whole, rest = divmod(value, unit)
    digits = unit.bit_length() - 1  # 1 / 2^n ends after n decimals
    fraction = str(rest * 10**digits // unit).zfill(digits).rstrip("0") if rest else ""
    return f"{whole}.{fraction}" if fraction else str(whole)
