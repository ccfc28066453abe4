"""One request as the scheduler side of the connector sees it."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, overload

from engine_shim.requests import HASH_BYTES, PooledRequest

NAME_CHARS_MAX: Final = 200


class BlockKeys(Sequence[bytes]):
    """Keys of a request's full blocks, made of the engine's own hashes as these grow.

    The engine may hash more finely than its blocks: then the last hash within a block is taken,
    since each covers the whole prefix. Hashes of another length are hashed to 32 bytes.
    """

    def __init__(self, hashes: Sequence[bytes], per_block: int) -> None:
        """hashes: `Request.block_hashes`; per_block: how many of them make a block."""
        self._hashes = hashes
        self._per_block = per_block

    def __len__(self) -> int:
        return len(self._hashes) // self._per_block

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(at)
        found = bytes(self._hashes[(at + 1) * self._per_block - 1])
        return found if len(found) == HASH_BYTES else hashlib.sha256(found).digest()


@dataclass(slots=True)
class Tracked:
    """A request between its first look-up and its end.

    request:   of the engine.
    attempt:   counts how often its blocks in the pool were begun anew.
    pooled:    its blocks in the pool, None while it has none and uses none.
    blocks:    its device blocks.
    local:     tokens that the engine's own prefix cache had at its last admission.
    hit:       tokens that were to be loaded beyond those.
    saved:     tokens whose rows are in the pool, or on their way (resident mode).
    resident:  tokens that its device blocks held before its last step (resident mode).
    floors:    (step, `resident` of it) of its steps that may not be reported yet.
    reached:   most tokens that a step of it has begun with.
    failures:  steps that failed it since then.
    last_step: number of its last step.
    waits_since: monotonic clock of the first refusal in a row, 0 for none.
    """

    request: Any
    keys: BlockKeys
    attempt: int = 0
    pooled: PooledRequest | None = None
    blocks: list[int] = field(default_factory=list)
    local: int = 0
    hit: int = 0
    saved: int = 0
    resident: int = 0
    floors: deque[tuple[int, int]] = field(default_factory=deque)
    reached: int = -1
    failures: int = 0
    last_step: int = 0
    waits_since: float = 0.0

    @property
    def request_id(self) -> str:
        """The engine's name of the request."""
        return str(self.request.request_id)

    @property
    def name(self) -> str:
        """The name of the present attempt in kvd; at most 256 characters, and no other's."""
        name = self.request_id
        if len(name) > NAME_CHARS_MAX:
            digest = hashlib.sha256(name.encode()).hexdigest()[:16]
            name = f"{name[: NAME_CHARS_MAX - 17]}~{digest}"
        return f"{name}~{self.attempt}" if self.attempt or "~" in name else name

    def waited(self) -> float:
        """Seconds since it was first refused in a row; the first call begins it."""
        now = time.monotonic()
        self.waits_since = self.waits_since or now
        return now - self.waits_since
