"""Drafts for multi-position decode: what may come next, guessed from what was said before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Proposes tokens that the model then verifies; a bad guess costs time, never correctness."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return at most `count` guesses for what follows `tokens`."""


class PromptLookup:
    """Finds the last place where the newest n-gram stood before, and proposes what followed."""

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2, window: int = 8192) -> None:
        """Look for n-grams of max_ngram down to min_ngram tokens in the last `window` tokens."""
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram is {min_ngram}; give 1 to max_ngram ({max_ngram})")
        if window <= max_ngram:
            raise ValueError(f"window is {window}; give more than max_ngram ({max_ngram})")
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram
        self._window = window

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return what followed the longest known n-gram, or nothing."""
        if count < 1:
            return []
        # A character per token: substring search is then the n-gram search.
        text = "".join(map(chr, tokens[-self._window :]))
        for size in range(self._max_ngram, self._min_ngram - 1, -1):
            # An earlier match has at least one token after it.
            found = text.rfind(text[-size:], 0, len(text) - 1) if size < len(text) else -1
            if found >= 0:
                return [ord(c) for c in text[found + size : found + size + count]]
        return []
