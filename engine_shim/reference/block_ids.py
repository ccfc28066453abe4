"""An engine's own block ids: who has which, and how often each was used."""

from __future__ import annotations


class BlockIds:
    """Ids 0 .. count - 1, lowest first. A generation tells one use of an id from the next."""

    def __init__(self, count: int) -> None:
        """All ids are free."""
        self._free = list(range(count - 1, -1, -1))
        self._generation = [0] * count
        self.count = count

    @property
    def num_free(self) -> int:
        """Ids that nobody has."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """Take ids.

        Raises: ValueError when there are not so many; none is taken then.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks are needed but {len(self._free)} are free")
        taken = tuple(self._free.pop() for _ in range(count))
        for block in taken:
            self._generation[block] += 1
        return taken

    def generation(self, block: int) -> int:
        """How often the id was taken."""
        return self._generation[block]

    def give_back(self, blocks: tuple[int, ...]) -> None:
        """Return ids."""
        self._free.extend(reversed(blocks))
