"""How deep bounded tests go: `KVD_TEST_DEPTH=N python -m pytest tests/stateful`, and others."""

from __future__ import annotations

import os

VARIABLE = "KVD_TEST_DEPTH"


def depth() -> int:
    """1 in a normal run; N tries about N times as much.

    Raises: ValueError when the variable is not a whole number from 1 on.
    """
    text = os.environ.get(VARIABLE, "1")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{VARIABLE}={text!r}: give a whole number from 1 on, or leave it unset")
    return int(text)
