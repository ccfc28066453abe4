"""The owner's half of the release gate: when a slot may be acquired.

kvd publishes one word for each slot, `epoch << 8 | state`. The owner of the slot is the only one
who acquires it, and it does so without asking: it starts when the word says *free* at an epoch
*greater than the last one it acquired*. Without the second half, the free word of its last
tenancy would be taken twice while kvd has not yet seen the acquire.

The word is needed because others may read the slot. Where the last tenancy was offered to nobody,
its holds were the owner's own; once it has posted the end of each, kvd can do nothing but release
the slot, to the next epoch, before it sees whatever the owner posts after that. Then the owner may
take that epoch *early*, without waiting for the word.
"""

from __future__ import annotations

from typing import Final

from kvd.wire.gate_layout import STATE_FREE, STATE_HELD, split_word

EARLY_STATES: Final = frozenset({STATE_FREE, STATE_HELD})
"""States of a word that may only be late; a slot that is closed or quarantined is not to be had."""

FREE: Final = "free"
EARLY: Final = "early"


class AcquiredEpochs:
    """The last epoch that this member acquired, for each of its slots; -1 for none."""

    def __init__(self, num_slots: int) -> None:
        """No slot was ever acquired."""
        self._last = [-1] * num_slots
        self._is_over = [False] * num_slots

    def last(self, slot: int) -> int:
        """The last epoch acquired, -1 for none."""
        return self._last[slot]

    def opening(self, slot: int, word: int) -> str:
        """How the slot is open to its owner: "free" by its word, "early" where only the word is
        late (see `is_over`), "" not at all.
        """
        epoch, state = split_word(word)
        if state == STATE_FREE and epoch > self._last[slot]:
            return FREE
        return EARLY if self._is_over[slot] and state in EARLY_STATES else ""

    def may_acquire(self, slot: int, word: int, *, early: bool = False) -> bool:
        """Whether the owner may write the slot now; early: also where only the word is late."""
        how = self.opening(slot, word)
        return how == FREE or (early and how == EARLY)

    def acquire(self, slot: int, word: int, *, early: bool = False) -> int:
        """Take the slot; returns the epoch of the new tenancy.

        Raises: ValueError when it may not be acquired.
        """
        how = self.opening(slot, word)
        if not how or (how == EARLY and not early):
            raise ValueError(f"slot {slot} may not be acquired at word {word:#x}")
        epoch = split_word(word)[0] if how == FREE else self._last[slot] + 1
        self._last[slot], self._is_over[slot] = epoch, False
        return epoch

    def is_over(self, slot: int) -> None:
        """All holds of the last tenancy were our own, and kvd was told the end of each.

        kvd can only release it, to the next epoch: what we say next of that epoch reaches it after
        those ends. Nobody but us could have touched the slot, so its next use need not wait.
        """
        self._is_over[slot] = True
