"""Greedy generation with the reference model: chunked prefill, then multi-position decode."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_shim.reference.cache import KvCache
from engine_shim.reference.drafts import Drafter
from engine_shim.reference.model import SparseModel


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a decode gave, and what it took.

    tokens:        the new tokens.
    num_steps:     forwards.
    num_accepted:  drafts that turned out right.
    num_rejected:  drafts that turned out wrong; their rows were voided by `truncate`.
    logits_digest: sha256 over the float32 logits of every new token, in order, as hex: equal
                   digests mean that two runs agree in every bit, not only in the winning token.
    """

    tokens: list[int]
    num_steps: int
    num_accepted: int
    num_rejected: int
    logits_digest: str


def prefill(
    model: SparseModel, cache: KvCache, tokens: Sequence[int], chunk: int, start: int = 0
) -> Tensor:
    """Compute the rows of a prompt, `chunk` tokens at a time.

    Args:    tokens: the whole prompt.
             chunk: tokens in one forward, 1 or more.
             start: tokens whose rows the cache already holds (a prefix hit); below len(tokens).
    Returns: logits after the last token: [1, vocab] float32.
    Raises:  ValueError naming the argument.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; give 1 or more")
    if not 0 <= start < len(tokens):
        raise ValueError(f"start is {start} for {len(tokens)} tokens; leave at least one")
    longest = model.config.max_positions
    if len(tokens) > longest:
        raise ValueError(f"tokens is {len(tokens)} long; give {longest} or less (max_positions)")
    logits = torch.empty(0)
    for begin in range(start, len(tokens), chunk):
        logits = model.forward(torch.tensor(tokens[begin : begin + chunk]), begin, cache)
    return logits


def decode(
    model: SparseModel,
    cache: KvCache,
    tokens: Sequence[int],
    num_new: int,
    drafter: Drafter | None = None,
    width: int = 1,
) -> Decoded:
    """Generate greedily after `tokens`.

    Each step computes the last token and up to width - 1 drafts at once, and keeps the drafts that
    greedy decoding would have chosen: the result does not depend on width or drafter, bit for bit.

    Args:   tokens: prompt and what was generated so far, 1 or more. The cache holds the rows of all
            but the last one; if it holds that too, it is written again with the same bits.
            num_new: tokens to generate, 0 or more.
            drafter: where drafts come from; needed if width > 1.
            width: positions computed in one step, 1 or more.
    Raises: ValueError naming the argument.
    Leaves: rows of all tokens but the last new one in the cache.
    """
    _check_decode(model, tokens, num_new, drafter, width)
    known = list(tokens)
    end = len(known) + num_new
    steps = accepted = rejected = 0
    digest = hashlib.sha256()
    while len(known) < end:
        room = min(width, end - len(known)) - 1
        drafts = drafter.propose(known, room) if drafter is not None and room else []
        start = len(known) - 1
        logits = model.forward(torch.tensor(known[-1:] + drafts), start, cache, all_positions=True)
        choices = logits.argmax(-1).tolist()
        right = _matching(drafts, choices)
        known += choices[: right + 1]
        digest.update(logits[: right + 1].numpy().tobytes())
        if drafts:
            cache.truncate(start + 1 + right)
        steps += 1
        accepted += right
        rejected += len(drafts) - right
    return Decoded(known[len(tokens) :], steps, accepted, rejected, digest.hexdigest())


def _check_decode(
    model: SparseModel, tokens: Sequence[int], num_new: int, drafter: Drafter | None, width: int
) -> None:
    if not tokens:
        raise ValueError("tokens is empty; give at least one")
    if num_new < 0:
        raise ValueError(f"num_new is {num_new}; give 0 or more")
    if width < 1:
        raise ValueError(f"width is {width}; give 1 or more")
    if width > 1 and drafter is None:
        raise ValueError(f"width is {width} without a drafter; give one, or width 1")
    # The last new token needs no row of its own.
    length, longest = len(tokens) + num_new, model.config.max_positions + 1
    if length > longest:
        raise ValueError(
            f"tokens and num_new are {length} together; give {longest} or less (max_positions + 1)"
        )


def _matching(drafts: list[int], choices: list[int]) -> int:
    """Return how many leading drafts are what the model chose in their place."""
    for count, (draft, choice) in enumerate(zip(drafts, choices, strict=False)):
        if draft != choice:
            return count
    return len(drafts)
