"""Sizes and durations: what is refused, with which remedy, and exact round trips."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    align_down,
    align_up,
    div_ceil,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)

VALUE_MAX = 2**63 - 1


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("64", 'write the unit, e.g. "64GiB"'),
        ("1.5", 'write the unit, e.g. "64GiB"'),
        ("64GB", "write GiB"),
        ("64G", "write GiB"),
        ("64gib", "write GiB"),
        ("8mb", "write MiB"),
        ("8K", "write KiB"),
        ("1TB", "write TiB"),
        ("12 bytes", "write B"),
        ("1PiB", "use one of B, KiB, MiB, GiB, TiB"),
        ("", "write a number and its unit"),
        ("GiB", "write a number and its unit"),
        ("-1GiB", "write a number and its unit"),
        ("1e3MiB", "write a number and its unit"),
        ("1,5GiB", "write a number and its unit"),
        ("٣GiB", "write a number and its unit"),
        ("9" * 5000 + "B", "write a number and its unit"),
        ("0.5B", "use a smaller unit"),
        ("1.0000000000001KiB", "use a smaller unit"),
        ("8388608TiB", "the largest size is 2^63 - 1 B"),
    ],
)
def test_size_refused_with_remedy(text: str, remedy: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_size(text)
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("30", 'write the unit, e.g. "30s"'),
        ("30sec", "write s"),
        ("10m", "write min"),
        ("2H", "write h"),
        ("5 minutes", "write min"),
        ("3d", "use one of ns, us, ms, s, min, h"),
        ("", "write a number and its unit"),
        ("-3s", "write a number and its unit"),
        ("0.5ns", "use a smaller unit"),
        ("9999999999h", "the largest duration is 2^63 - 1 ns"),
    ],
)
def test_duration_refused_with_remedy(text: str, remedy: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_duration(text)
    assert remedy in str(caught.value)


@pytest.mark.parametrize("value", [-1, 2**63])
def test_formatters_refuse_what_cannot_be_parsed_back(value: int) -> None:
    with pytest.raises(ValueError, match=r"a size must be between 0 and 2\^63 - 1"):
        format_size(value)
    with pytest.raises(ValueError, match=r"a duration must be between 0 and 2\^63 - 1"):
        format_duration(value)


@pytest.mark.parametrize("divisor", [0, -4])
def test_rounding_refuses_a_divisor_below_one(divisor: int) -> None:
    for call in (div_ceil, align_up, align_down):
        with pytest.raises(ValueError, match=f"must be positive, got {divisor}"):
            call(7, divisor)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0B", 0),
        ("1B", 1),
        ("4KiB", 4 * KIB),
        ("64MiB", 64 * MIB),
        ("1.5GiB", 3 * GIB // 2),
        ("64GiB", 64 * GIB),
        ("0.5TiB", TIB // 2),
        (" 2 GiB ", 2 * GIB),
        ("9223372036854775807B", VALUE_MAX),
    ],
)
def test_size_read(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0B"),
        (1, "1B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (4097, "4097B"),
        (3 * GIB // 2, "1.5GiB"),
        (1280 * MIB, "1.25GiB"),
        (64 * GIB, "64GiB"),
        (2048 * TIB, "2048TiB"),
    ],
)
def test_size_written_shortest(value: int, text: str) -> None:
    assert format_size(value) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0s", 0),
        ("7ns", 7),
        ("3us", 3_000),
        ("200ms", 200_000_000),
        ("1500ms", 1_500_000_000),
        ("30s", 30_000_000_000),
        ("10min", 600_000_000_000),
        ("1h", 3_600_000_000_000),
    ],
)
def test_duration_read_and_written(text: str, value: int) -> None:
    assert parse_duration(text) == value
    assert format_duration(value) == text


def test_duration_fraction_read() -> None:
    assert parse_duration("1.5s") == 1_500_000_000
    assert parse_duration("0.25h") == 15 * 60 * 1_000_000_000


@given(st.integers(0, VALUE_MAX))
def test_size_round_trip_is_exact(value: int) -> None:
    text = format_size(value)
    assert parse_size(text) == value
    assert len(text) <= len(f"{value}B")


@given(st.integers(0, VALUE_MAX))
def test_duration_round_trip_is_exact(value: int) -> None:
    assert parse_duration(format_duration(value)) == value


@given(st.text(max_size=60).filter(lambda text: not text.strip()[:1].isdecimal()))
def test_any_other_text_is_one_sentence_of_value_error(text: str) -> None:
    for parse in (parse_size, parse_duration):
        with pytest.raises(ValueError) as caught:
            parse(text)
        assert str(caught.value).startswith('"')
        assert str(caught.value).isprintable()


@given(st.integers(-(2**70), 2**70), st.integers(1, 2**40))
def test_rounding_brackets_the_value(value: int, alignment: int) -> None:
    low, high = align_down(value, alignment), align_up(value, alignment)
    assert low % alignment == high % alignment == 0
    assert low <= value <= high
    assert high - low in (0, alignment)
    assert div_ceil(value, alignment) * alignment == high
