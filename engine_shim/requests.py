"""The scheduler's side of a request's blocks: look up, reserve for each chunk, commit, end.

The pool is the primary copy: what a request computed and will read again lies in blocks that it
keeps pinned until it ends; the next chunk's blocks are reserved before the chunk runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from engine_shim.client import KvdRefused

HASH_BYTES = 32

POOL_FULL: Final = "pool_full"
"""Code of a reservation for which there is no room now."""


class BlockClient(Protocol):
    """What is needed of the client; `engine_shim.client.KvdClient` has it."""

    @property
    def generation(self) -> int:
        """Rises when kvd lost its pool."""

    def lookup(self, request: str, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix hit, pinned for the request."""

    def reserve(self, request: str, count: int) -> list[int]:
        """Private blocks; all or nothing."""

    def commit(
        self,
        blocks: Sequence[int],
        hashes: Sequence[bytes],
        tokens: Sequence[int],
        deadline_s: float | None = None,
        *,
        request: str = "",
    ) -> list[str]:
        """Keys for blocks; a code for each."""

    def unpin(self, request: str, blocks: Sequence[int] | None = None) -> None:
        """The request needs these blocks no more; None: it has ended."""

    def abort(self, request: str) -> None:
        """The request was aborted."""


@dataclass(slots=True)
class PooledRequest:
    """A request's blocks in the pool.

    hashes:    of its full blocks, in order; may grow while the request runs.
    blocks:    pool blocks of tokens [0, len(blocks) * block_tokens).
    hit_tokens: tokens that were found.
    committed: full blocks that have their key.
    """

    request: str
    hashes: Sequence[bytes]
    generation: int
    blocks: list[int] = field(default_factory=list)
    hit_tokens: int = 0
    committed: int = 0


class RequestPool:
    """Requests of one engine in the pool of its kvd."""

    def __init__(self, client: BlockClient, block_tokens: int) -> None:
        """client: of a member that is a scheduler."""
        self._client = client
        self._size = block_tokens
        self.block_tokens = block_tokens
        self.shed_blocks = 0

    def begin(self, request: str, hashes: Sequence[bytes]) -> PooledRequest:
        """Begin a request without looking up what is there of its prefix."""
        return PooledRequest(request, hashes, self._client.generation)

    def admit(self, request: str, hashes: Sequence[bytes], num_tokens: int) -> PooledRequest:
        """Begin a request with what is there of its prefix.

        Args:
            hashes: of its full blocks.
            num_tokens: its length; at least one token is always computed.
        Raises: KvdRefused.
        """
        generation = self._client.generation
        usable = tuple(hashes[: max(0, (num_tokens - 1) // self._size)])
        found = self._client.lookup(request, usable) if usable else []
        pooled = PooledRequest(request, hashes, generation, list(found))
        pooled.hit_tokens = len(found) * self._size
        pooled.committed = len(found)
        return pooled

    def drop_last(self, pooled: PooledRequest) -> None:
        """Do without the last block that was found.

        Raises: KvdRefused.
        """
        dropped = pooled.blocks.pop()
        pooled.hit_tokens -= self._size
        pooled.committed = len(pooled.blocks)
        self._client.unpin(pooled.request, [dropped])

    def extend(self, pooled: PooledRequest, num_tokens: int, *, optional: bool = False) -> None:
        """Make sure that there are blocks for tokens [0, num_tokens).

        optional: a full pool is no error: these tokens go without blocks, which is counted in
            `shed_blocks`. Only for tokens that the request itself never loads again.
        Raises: KvdRefused(pool_full | pool_lost | ...), with nothing changed.
        """
        self._check(pooled)
        missing = -(-num_tokens // self._size) - len(pooled.blocks)
        if missing <= 0:
            return
        try:
            pooled.blocks.extend(self._client.reserve(pooled.request, missing))
        except KvdRefused as error:
            if not optional or error.code != POOL_FULL:
                raise
            self.shed_blocks += missing

    def commit(self, pooled: PooledRequest, num_tokens: int) -> int:
        """Give every full block of tokens [0, num_tokens) its key; returns how many are new.

        Tokens that `extend` left without blocks get none.
        Raises: KvdRefused for a block that was refused.
        """
        self._check(pooled)
        full = min(num_tokens // self._size, len(pooled.hashes), len(pooled.blocks))
        fresh = range(pooled.committed, full)
        if not fresh:
            return 0
        blocks = [pooled.blocks[at] for at in fresh]
        keys = [pooled.hashes[at] for at in fresh]
        codes = self._client.commit(
            blocks, keys, [self._size] * len(blocks), request=pooled.request
        )
        for block, code in zip(blocks, codes, strict=False):
            # Another engine stored the same tokens first: its copy serves as well as ours.
            if code not in ("", "duplicate"):
                raise KvdRefused(code, block=block, request=pooled.request)
        pooled.committed = full
        return len(blocks)

    def end(self, pooled: PooledRequest) -> None:
        """The request is over; committed blocks stay in the pool for others.

        Raises: KvdRefused.
        """
        if pooled.generation == self._client.generation:
            self._client.unpin(pooled.request)

    def abort(self, pooled: PooledRequest) -> None:
        """The request was aborted; what it has not committed is worthless.

        Raises: KvdRefused.
        """
        if pooled.generation == self._client.generation:
            self._client.abort(pooled.request)

    def _check(self, pooled: PooledRequest) -> None:
        if pooled.generation != self._client.generation:
            raise KvdRefused("pool_lost", what=f"the blocks of request {pooled.request}")
