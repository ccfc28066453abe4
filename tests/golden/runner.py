"""Runs release scripts: blocks of lines, `----`, and what has to come of them.

    # text after a hash is for the reader
    acquired
    written saves=s
    ----
    -
    -
    @0 computing_draining saves=open: COMPUTE, SAVE s

For each line one line of effects (`-` for none), then one line for the slot. A blank line ends a
block. `KVD_TEST_REWRITE=1 python -m pytest tests/golden` writes what comes now; look at the diff.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.core import slot_events as ev
from kvd.core.holds import Timing
from kvd.core.ids import SlotRef
from kvd.core.release import transition
from kvd.core.slot import Rules, Slot, announced
from kvd.core.units import parse_duration
from tests.exhaustive.classes import ClassEdge, class_edge
from tests.golden.language import (
    MEMBER,
    ScriptError,
    names,
    parse_event,
    parse_read,
    process,
    settings,
    show_effect,
    show_slot,
    split_ref,
)

RULE = "----"


@dataclass(frozen=True, slots=True)
class Block:
    """Lines of one block: remarks, what is said, and what is expected."""

    line_no: int
    said: tuple[str, ...]
    expected: tuple[str, ...]


@dataclass(slots=True)
class Run:
    """A script while it runs."""

    rules: Rules = field(default_factory=lambda: Rules(Timing(read_attempts=2), 4))
    slot: Slot = field(default_factory=lambda: Slot(SlotRef(MEMBER, 0, 0)))
    now: int = 0
    edges: set[ClassEdge] = field(default_factory=set)

    def say(self, line: str) -> str:
        """Carry out one line; returns its effects.

        Raises: ScriptError.
        """
        words, ref = split_ref(line.split(), self.slot.ref)
        if words[0] == "rules":
            self.rules = _rules(settings(words[1:]))
            return "-"
        if words[0] == "announced":
            self.slot = _announced(settings(words[1:]), ref, self.now, self.rules)
            return "-"
        if words[0] == "tick":
            self.now += parse_duration(words[1])
            return self._feed(ev.Ticked(ref))
        return self._feed(parse_event(words, ref))

    def _feed(self, event: ev.SlotEvent) -> str:
        before = self.slot
        self.slot, effects = transition(before, event, self.now, self.rules)
        if event.ref == before.ref:
            self.edges.add(class_edge(before, event, self.slot, effects))
        return ", ".join(show_effect(effect) for effect in effects) or "-"


def _rules(given: dict[str, str]) -> Rules:
    readers = int(given.pop("readers", "4"))
    attempts = int(given.pop("attempts", "2"))
    questions = int(given.pop("questions", "6"))
    if given:
        raise ScriptError(f"unknown rules {sorted(given)}")
    return Rules(Timing(read_attempts=attempts, query_attempts=questions), readers)


def _announced(given: dict[str, str], ref: SlotRef, now: int, rules: Rules) -> Slot:
    computing = given.pop("computing", None) is not None
    savers = tuple(names(given.pop("saves", "")))
    reads = tuple(
        (parse_read(name), process(executor))
        for name, _, executor in (text.partition(":") for text in names(given.pop("reads", "")))
    )
    if given:
        raise ScriptError(f"cannot announce {sorted(given)}")
    return announced(ref, computing, savers, reads, now, rules)


def parse(text: str) -> list[Block]:
    """The blocks of a script.

    Raises: ScriptError when a block has no `----`.
    """
    blocks: list[Block] = []
    lines = text.splitlines()
    start = 0
    while start < len(lines):
        end = next((at for at in range(start, len(lines)) if not lines[at].strip()), len(lines))
        block = lines[start:end]
        if RULE in block:
            cut = block.index(RULE)
            said = tuple(line for line in block[:cut] if not line.startswith("#"))
            blocks.append(Block(start + 1, said, tuple(block[cut + 1 :])))
        elif any(not line.startswith("#") for line in block):
            raise ScriptError(f"line {start + 1}: a block without {RULE}")
        start = end + 1
    return blocks


def run(text: str) -> tuple[list[tuple[Block, tuple[str, ...]]], set[ClassEdge]]:
    """Run a script; returns each block with what really came of it, and the edges it walked.

    Raises: ScriptError, with the number of the block's first line.
    """
    state = Run()
    done: list[tuple[Block, tuple[str, ...]]] = []
    for block in parse(text):
        try:
            got = [state.say(line) for line in block.said]
        except ScriptError as error:
            raise ScriptError(f"block at line {block.line_no}: {error}") from error
        done.append((block, (*got, show_slot(state.slot))))
    return done, state.edges


def rewritten(text: str) -> str:
    """The script with what comes of it now in place of what was expected."""
    results = [got for _, got in run(text)[0]]
    out: list[str] = []
    skipping = False
    for line in text.splitlines():
        if not line.strip():
            skipping = False
        if not skipping:
            out.append(line)
        if line == RULE:
            out += results.pop(0)
            skipping = True
    return "\n".join(out) + "\n"
