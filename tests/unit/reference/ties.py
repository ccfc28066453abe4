"""Tokens of runs that round differently: equal, but where two of them are as good as each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from engine_shim.reference.cache import ResidentCache
from engine_shim.reference.model import SparseModel

TIE: Final = 0.02
"""Logits have a deviation of 1. Forms of attention that differ by 2e-5 of the largest element were
seen to move logits by 0.013 at most, where a stored row rounds to its other neighbour."""


def check_same_but_for_ties(
    model: SparseModel, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int]
) -> None:
    """Assert that both are equal up to the first tie; what follows that is another text."""
    assert len(expected) == len(got)
    pairs = zip(expected, got, strict=True)
    first = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    if first is None:
        return
    known = [*prompt, *expected[:first]]
    logits = model.forward(torch.tensor(known), 0, ResidentCache(model.config, len(known)))[0]
    gap = float(logits[expected[first]] - logits[got[first]])
    assert abs(gap) <= TIE, f"token {first} is {got[first]}, not {expected[first]}: gap {gap}"
