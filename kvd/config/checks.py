"""Checks between keys: each has a name, the keys it reads, and one sentence when it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvd.config.model import Config
from kvd.core.units import KIB, format_duration, format_size

HASH_BYTES: Final = 32
# Envelope of a frame around its hash list: header, request name, offsets.
_FRAME_OVERHEAD_BYTES: Final = 64 * KIB


@dataclass(frozen=True, slots=True)
class CrossCheck:
    """One relation between keys; `problem` returns a sentence when it does not hold, else ""."""

    name: str
    keys: tuple[str, ...]
    problem: Callable[[Config], str]


def cross_check(config: Config, skip: set[str]) -> list[str]:
    """Run the checks whose keys are all valid.

    Args: skip: keys whose own value is wrong already; config holds their default.
    Returns: one line for each check that fails: keys, sentence, name of the check.
    """
    failed = (
        (check, check.problem(config)) for check in _CHECKS if not skip.intersection(check.keys)
    )
    return [
        f"{', '.join(check.keys)}: {problem} (check {check.name})"
        for check, problem in failed
        if problem
    ]


def _frame_holds_hashes(config: Config) -> str:
    need = config.limits.blocks_per_request * HASH_BYTES + _FRAME_OVERHEAD_BYTES
    have = config.server.frame_size_max
    if need <= have:
        return ""
    return (
        f"the hashes of {config.limits.blocks_per_request} blocks need a frame of "
        f"{format_size(need)}, over {format_size(have)}: raise server.frame_size_max or lower "
        f"limits.blocks_per_request to {max(0, have - _FRAME_OVERHEAD_BYTES) // HASH_BYTES}"
    )


def _connect_within_transfer(config: Config) -> str:
    return _shorter(
        "peers.connect_timeout",
        config.peers.connect_timeout,
        "peers.transfer_deadline",
        config.peers.transfer_deadline,
    )


def _read_within_transfer(config: Config) -> str:
    return _shorter(
        "release.read_deadline",
        config.release.read_deadline,
        "peers.transfer_deadline",
        config.peers.transfer_deadline,
    )


def _cure_before_unready(config: Config) -> str:
    release = config.release
    cure = release.read_deadline + release.query_attempts * release.query_interval
    unready = config.readiness.oldest_wait_max
    if cure <= unready:
        return ""
    return (
        f"a lost read is cured after {format_duration(cure)} (read_deadline + query_attempts x "
        f"query_interval) but readiness ends after {format_duration(unready)}: raise "
        "readiness.oldest_wait_max or shorten the others"
    )


def _low_below_high(config: Config) -> str:
    low, high = config.pool.low_water, config.pool.high_water
    if low <= high:
        return ""
    return f"pool.low_water is {low}, above the {high} of pool.high_water: lower the one"


def _stores_differ(config: Config) -> str:
    names = config.store.names
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    return f'"{twice[0]}" is named twice: take one out' if twice else ""


def _default_store_exists(config: Config) -> str:
    default, names = config.store.default, ", ".join(config.store.names)
    if default in config.store.names:
        return ""
    return f'store.default is "{default}", which is not one of {names}: add it, or choose another'


def _shorter(low: str, low_ns: int, high: str, high_ns: int) -> str:
    if low_ns <= high_ns:
        return ""
    return (
        f"{low} is {format_duration(low_ns)}, longer than the {format_duration(high_ns)} of "
        f"{high}: shorten the one or raise the other"
    )


_CHECKS: Final = (
    CrossCheck(
        "frame_holds_hashes",
        ("server.frame_size_max", "limits.blocks_per_request"),
        _frame_holds_hashes,
    ),
    CrossCheck(
        "connect_within_transfer",
        ("peers.connect_timeout", "peers.transfer_deadline"),
        _connect_within_transfer,
    ),
    CrossCheck(
        "read_within_transfer",
        ("release.read_deadline", "peers.transfer_deadline"),
        _read_within_transfer,
    ),
    CrossCheck("low_below_high", ("pool.low_water", "pool.high_water"), _low_below_high),
    CrossCheck("stores_differ", ("store.names",), _stores_differ),
    CrossCheck("default_store_exists", ("store.names", "store.default"), _default_store_exists),
    CrossCheck(
        "cure_before_unready",
        (
            "release.read_deadline",
            "release.query_attempts",
            "release.query_interval",
            "readiness.oldest_wait_max",
        ),
        _cure_before_unready,
    ),
)
