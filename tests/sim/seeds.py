"""`seeds.txt`: seeds that failed once, and the bug that each of them found."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PATH = Path(__file__).with_name("seeds.txt")


class PastSeed(NamedTuple):
    """A line of `seeds.txt`; `bug` is the name of a mutant where there is one."""

    seed: int
    bug: str


def read(text: str) -> list[PastSeed]:
    """Parse lines `SEED  BUG`; empty ones and those that start with # are skipped.

    Raises: ValueError: a line without a number or without a name.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        seed, _, bug = line.partition(" ")
        if not seed.isdecimal() or not bug.strip():
            raise ValueError(f"line {number}: {line!r} is not a seed and the name of a bug")
        found.append(PastSeed(int(seed), bug.strip()))
    return found


def past() -> list[PastSeed]:
    """All past seeds."""
    return read(PATH.read_text(encoding="utf-8"))
