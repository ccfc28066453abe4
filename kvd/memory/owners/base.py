"""What an owner of memory is: a party outside the daemon that holds descriptors under names.

The kernel frees a memfd when its last descriptor and mapping are gone. So whoever holds a
descriptor keeps the bytes, whatever becomes of the daemon, and need not understand them.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import Final, Protocol

from kvd.core.ids import MemberRef

NAME_BYTES_MAX: Final = 200
NAMES_MAX: Final = 4096
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,200}")

ENGINE: Final = "engine"
DAEMON: Final = "daemon"
STOP: Final = "stop"
"""What content may survive: an engine's death, the daemon's death, a stop and start of it."""


def check_name(name: str) -> str:
    """The name, if an owner may keep something under it.

    Raises: ValueError.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"name {name[:40]!r} must have 1 to {NAME_BYTES_MAX} of A-Z a-z 0-9 ._-")
    return name


def kept_member(ref: MemberRef) -> str:
    """The name under which a member's pidfd is kept."""
    return f"member-{_digest(f'{ref.engine}/{ref.member}#{ref.incarnation:x}')}"


def kept_region(name: str) -> str:
    """The name under which a decode region's memory is kept."""
    return f"region-{_digest(name)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class MemoryOwner(Protocol):
    """Keeps descriptors. No call waits longer than a few seconds.

    `keep` and `drop` may be called from any thread, the rest from one.
    """

    @property
    def name(self) -> str:
        """As in `pool.owner`: none, holder or fdstore."""

    @property
    def survives(self) -> tuple[str, ...]:
        """Whose end the kept content outlives."""

    @property
    def connection_fd(self) -> int:
        """Readable once the owner is gone; -1 when there is no connection to watch."""

    def take(self) -> dict[str, int]:
        """What an earlier life left, by name; the caller closes the descriptors. Asked once.

        What is taken stays kept, too, until `drop`.
        Raises: LocalError(owner_unavailable).
        """

    def keep(self, name: str, fd: int) -> None:
        """Keep a duplicate of a descriptor; one of the same name is given up.

        Raises: LocalError(owner_unavailable).
        """

    def drop(self, name: str) -> None:
        """Give up a name; one that is not kept is no error."""

    def confirm(self) -> None:
        """Return once all that was kept so far is safe, should the daemon die now.

        Raises: LocalError(owner_unavailable).
        """

    def release(self) -> None:
        """The daemon stops as asked: give up what must not outlive that."""

    def close(self) -> None:
        """Drop the connection; what is kept stays kept. Idempotent."""


class NoOwner:
    """Nobody: content ends with the daemon."""

    name = "none"
    survives = (ENGINE,)
    connection_fd = -1

    def take(self) -> dict[str, int]:
        """See `MemoryOwner`."""
        return {}

    def keep(self, name: str, fd: int) -> None:
        """See `MemoryOwner`."""

    def drop(self, name: str) -> None:
        """See `MemoryOwner`."""

    def confirm(self) -> None:
        """See `MemoryOwner`."""

    def release(self) -> None:
        """See `MemoryOwner`."""

    def close(self) -> None:
        """See `MemoryOwner`."""


def close_all(fds: dict[str, int]) -> None:
    """Close descriptors and forget them."""
    while fds:
        os.close(fds.popitem()[1])
