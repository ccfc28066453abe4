"""Seeded requests to a prefix cache: for each, the blocks of its prompt, first block first.

Blocks are numbers; two requests share a prefix exactly where their numbers are equal. The shapes
are those that a pool of KV blocks meets:

    prompts        system prompts of Zipf popularity, each with a question of its own behind it
    chat           conversations: every turn asks for all earlier ones and a little more
    documents      a set of documents, each asked about again and again, at random
    prompts+scan   prompts, and one request in 21 reads a long document that never comes back
    chat+scan      conversations with the same scan
    mix            half prompts, half conversations, and the scan
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice

Request = tuple[int, ...]

PROMPTS = 300
ZIPF = 0.9
CONVERSATIONS = 150
TURNS = 8
DOCUMENTS = 120


class Numbers:
    """Fresh block numbers and the randomness of one trace."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._next = 0

    def fresh(self, low: int, high: int) -> Request:
        """Between low and high blocks that nobody had before."""
        count = self.random.randint(low, high)
        self._next += count
        return tuple(range(self._next - count, self._next))


def prompts(numbers: Numbers) -> Iterator[Request]:
    """See the module."""
    system = [numbers.fresh(4, 48) for _ in range(PROMPTS)]
    weights = list(accumulate(1 / (rank + 1) ** ZIPF for rank in range(PROMPTS)))
    while True:
        at = bisect(weights, numbers.random.random() * weights[-1])
        yield system[at] + numbers.fresh(1, 12)


def chat(numbers: Numbers) -> Iterator[Request]:
    """See the module; who spoke lately is more likely to speak next."""
    talks: list[Request] = [()] * CONVERSATIONS
    while True:
        at = int(numbers.random.expovariate(1) * CONVERSATIONS / 4)
        talk = talks.pop(min(at, CONVERSATIONS - 1))
        if not talk or numbers.random.random() < 1 / TURNS:
            talk = numbers.fresh(2, 20)
        else:
            talk = talk + numbers.fresh(1, 8)
        talks.insert(0, talk)
        yield talk


def documents(numbers: Numbers) -> Iterator[Request]:
    """See the module."""
    shelf = [numbers.fresh(20, 120) for _ in range(DOCUMENTS)]
    while True:
        yield numbers.random.choice(shelf) + numbers.fresh(1, 4)


def scan(numbers: Numbers) -> Iterator[Request]:
    """Long documents, each read once."""
    while True:
        yield numbers.fresh(150, 700)


def blend(
    numbers: Numbers, sources: Sequence[Iterator[Request]], weights: Sequence[int]
) -> Iterator[Request]:
    """Requests of several sources in random order."""
    while True:
        yield next(numbers.random.choices(sources, weights)[0])


def traces(count: int) -> dict[str, list[Request]]:
    """All traces, `count` requests each."""
    made: dict[str, list[Request]] = {}
    for seed, name in enumerate(
        ("prompts", "chat", "documents", "prompts+scan", "chat+scan", "mix"), 1
    ):
        numbers = Numbers(seed)
        made[name] = list(islice(_source(name, numbers), count))
    return made


def _source(name: str, numbers: Numbers) -> Iterator[Request]:
    match name:
        case "prompts":
            return prompts(numbers)
        case "chat":
            return chat(numbers)
        case "documents":
            return documents(numbers)
        case "prompts+scan":
            return blend(numbers, (prompts(numbers), scan(numbers)), (20, 1))
        case "chat+scan":
            return blend(numbers, (chat(numbers), scan(numbers)), (20, 1))
        case _:
            parts = (prompts(numbers), chat(numbers), scan(numbers))
            return blend(numbers, parts, (10, 10, 1))
