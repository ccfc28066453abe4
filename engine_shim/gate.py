"""The owner's half of the release gate: when a slot may be acquired.

kvd publishes one word for each slot, `epoch << 8 | state`. The owner of the slot is the only one
who acquires it, and it does so without asking: it starts when the word says *free* at an epoch
*greater than the last one it acquired*. Without the second half, the free word of its last
tenancy would be taken twice while kvd has not yet seen the acquire.
"""

from __future__ import annotations

from kvd.wire.gate_layout import STATE_FREE, split_word


class AcquiredEpochs:
    """The last epoch that this member acquired, for each of its slots; -1 for none."""

    def __init__(self, num_slots: int) -> None:
        """No slot was ever acquired."""
        self._last = [-1] * num_slots

    def last(self, slot: int) -> int:
        """The last epoch acquired, -1 for none."""
        return self._last[slot]

    def may_acquire(self, slot: int, word: int) -> bool:
        """Whether the gate word lets the owner write the slot now."""
        epoch, state = split_word(word)
        return state == STATE_FREE and epoch > self._last[slot]

    def acquire(self, slot: int, word: int) -> int:
        """Take the slot; returns the epoch of the new tenancy.

        Raises: ValueError when the word does not allow it.
        """
        if not self.may_acquire(slot, word):
            raise ValueError(f"slot {slot} may not be acquired at word {word:#x}")
        epoch, _ = split_word(word)
        self._last[slot] = epoch
        return epoch
