"""What an engine asks of its kvd, beside the steps of its slots: one method for each operation.

Every method takes `deadline_s`, seconds from now, None for the default of the options. All raise
`KvdRefused`; beside what each names, with these codes: `unreachable` (no connection now, or it
ended before the reply), `deadline_exceeded` (in both cases whether it was done is not known),
`busy`, `closed`, `process_forked`, `frame_malformed`, `frame_too_large`, `limit_reached`.

Blocks are numbers of pool blocks, hashes have 32 bytes. Lists longer than kvd takes in one frame
are sent in parts: when one part is refused, the parts before it were done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from engine_shim.client.calls import Caller, Reply
from engine_shim.client.errors import KvdRefused
from engine_shim.client.session import SUMS_REGION, Core
from kvd.wire import messages as msg
from kvd.wire.hot_figures import LayerFigures, RequestFigures
from kvd.wire.protocol import DIGEST_BYTES
from kvd.wire.sum_layout import SumView
from kvd_kernels.host import Mapping

HASH_BYTES: Final = DIGEST_BYTES


class Operations:
    """Requests of one member."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._caller = Caller(core)
        self._sums: tuple[Mapping | None, SumView | None] = (None, None)

    # Requests and blocks (scheduler members) --------------------------------------------------

    def lookup(
        self,
        request: str,
        hashes: Sequence[bytes],
        *,
        pin: bool = True,
        deadline_s: float | None = None,
    ) -> list[int]:
        """Blocks of the longest prefix hit, pinned for the request on a lease.

        Raises: KvdRefused(not_scheduler | request_ended).
        """
        end, blob = self._caller.end(deadline_s), _blob(hashes)
        what = f"the lookup of {request}"
        return self._ask(msg.Lookup, (request, blob, pin), msg.Found, what, end).blocks

    def reserve(self, request: str, count: int, deadline_s: float | None = None) -> list[int]:
        """Private blocks for a request, all or nothing; from now on its pins have no lease.

        Raises: KvdRefused(not_scheduler | pool_full | reserve_too_large | request_ended).
        """
        end = self._caller.end(deadline_s)
        what = f"the reserve of {request}"
        return self._ask(msg.Reserve, (request, count), msg.Taken, what, end).blocks

    def commit(
        self,
        blocks: Sequence[int],
        hashes: Sequence[bytes],
        tokens: Sequence[int],
        deadline_s: float | None = None,
        *,
        request: str = "",
    ) -> list[str]:
        """Give blocks their keys; tokens: valid ones in each.

        Args: request: whose blocks they must still be, '' for not checked.
        Returns: a code for each block, '' where it is done; `duplicate` where another block has
            that key already.
        Raises: KvdRefused(not_scheduler).
        """
        if not len(blocks) == len(hashes) == len(tokens):
            detail = f"commit of {len(blocks)} blocks, {len(hashes)} hashes, {len(tokens)} counts"
            raise KvdRefused("frame_malformed", detail=detail)
        end = self._caller.end(deadline_s)
        codes: list[str] = []
        for part in self._parts(len(blocks)):
            some, blob, counts = list(blocks[part]), _blob(hashes[part]), list(tokens[part])
            codes += self._statuses(
                msg.Commit, (some, blob, counts, request), "commit", len(some), end
            )
        return codes

    def unpin(
        self, request: str, blocks: Sequence[int] | None = None, deadline_s: float | None = None
    ) -> None:
        """The request needs these blocks no more; None: it has ended.

        Raises: KvdRefused(not_scheduler).
        """
        some = None if blocks is None else list(blocks)
        self._done(msg.Unpin, (request, some), f"the unpin of {request}", deadline_s)

    def abort(self, request: str, deadline_s: float | None = None) -> None:
        """The request was aborted: its uncommitted blocks are worthless.

        Raises: KvdRefused(not_scheduler).
        """
        self._done(msg.Abort, (request,), f"the abort of {request}", deadline_s)

    def renew(self, request: str, deadline_s: float | None = None) -> None:
        """Keep the pins of a looked-up request for another lease.

        Raises: KvdRefused(not_scheduler | request_unknown).
        """
        self._done(msg.Renew, (request,), f"the renewal of {request}", deadline_s)

    def poison(self, blocks: Sequence[int], deadline_s: float | None = None) -> None:
        """These blocks hold wrong bytes: nobody shall find them any more."""
        end = self._caller.end(deadline_s)
        for part in self._parts(len(blocks)):
            self._ask(msg.Poison, (list(blocks[part]),), msg.Done, "poison", end)

    # Decode regions ---------------------------------------------------------------------------

    def region_create(
        self,
        region: str,
        num_layers: int,
        num_blocks: int,
        block_tokens: int,
        row_bytes: int,
        deadline_s: float | None = None,
    ) -> Mapping:
        """A region of [num_layers][num_blocks][block_tokens] rows of row_bytes, mapped here.

        The members of an engine share one; whoever asks for it again, in the same shape, gets it.
        The mapping belongs to the client: it is closed by `region_destroy`, by `close`, and once a
        restart of kvd has made it void.

        Raises: KvdRefused(region_exists | memory_short).
        """
        end = self._caller.end(deadline_s)
        body = (region, num_layers, num_blocks, block_tokens, row_bytes)
        self._ask(msg.RegionCreate, body, msg.Done, f"the creation of region {region}", end)
        return self._caller.map_region(region, end)

    def region_destroy(self, region: str, deadline_s: float | None = None) -> None:
        """Unmap a region here and give it back.

        Raises: BufferError: a view of it is alive; nothing was done. KvdRefused(region_unknown).
        """
        core = self._core
        core.check_process()
        with core.lock:
            mapping = core.regions.get(region)
        if mapping is not None:
            mapping.close()
            with core.lock, suppress(KeyError):
                del core.regions[region]
        self._done(msg.RegionDestroy, (region,), f"the end of region {region}", deadline_s)

    def region_forget(self, region: str) -> None:
        """Unmap a region here that a restarted kvd does not know; nothing is asked of kvd.

        It is unmapped in the background, as soon as no view of it is alive.
        """
        core = self._core
        core.check_process()
        with core.lock:
            mapping = core.regions.pop(region, None)
        # Even with nothing to add: what views had kept mapped is tried once more.
        core.retired.add([mapping] if mapping is not None else [])

    def allocated(
        self,
        region: str,
        blocks: Sequence[tuple[int, int]],
        deadline_s: float | None = None,
    ) -> list[str]:
        """Engine block ids that are used anew, each with its generation.

        Returns: a code for each, '' where it may be used; `destination_busy` while a read may still
            write there.
        Raises: KvdRefused(region_unknown).
        """
        end = self._caller.end(deadline_s)
        codes: list[str] = []
        for part in self._parts(len(blocks)):
            some = list(blocks[part])
            what = f"the allocation in region {region}"
            codes += self._statuses(msg.Allocated, (region, some), what, len(some), end)
        return codes

    # Checksums --------------------------------------------------------------------------------

    def span_sums(self, deadline_s: float | None = None) -> SumView | None:
        """What the checksums of the pool's spans must be, None when kvd keeps none.

        Asked for once in each life of kvd; reading it costs no request.

        Raises: KvdRefused(frame_malformed): what kvd mapped is something else.
        """
        core = self._core
        with core.lock:
            session, known = core.session, core.regions.get(SUMS_REGION)
        if session is None or session.checksums == "off":
            return None
        if known is None:
            try:
                known = self._caller.map_region(SUMS_REGION, self._caller.end(deadline_s))
            except KvdRefused as refusal:
                if refusal.code == "region_unknown":
                    return None  # kvd had no memory for it
                raise
        seen, view = self._sums
        if seen is not known or view is None:
            try:
                view = SumView(known)
            except ValueError as error:
                raise KvdRefused("frame_malformed", detail=str(error)) from error
            self._sums = known, view
        return view

    # Transfers --------------------------------------------------------------------------------

    def expect(
        self,
        transfer: str,
        region: str,
        blocks: Sequence[int],
        tokens: int,
        num_layers: int,
        lifetime_s: float,
        deadline_s: float | None = None,
    ) -> None:
        """Name the destination of a transfer: rows [0, tokens) in these blocks of the region.

        Args: lifetime_s: after so long it has failed.
        Raises: KvdRefused(region_unknown | destination_busy).
        """
        lifetime_ms = max(1, round(lifetime_s * 1000))
        body = (transfer, region, list(blocks), tokens, num_layers, lifetime_ms)
        self._done(msg.Expect, body, f"the destination of transfer {transfer}", deadline_s)

    def await_transfer(self, transfer: str, deadline_s: float | None = None) -> int:
        """Wait until a transfer is over; returns its tokens.

        Raises: KvdRefused(transfer_unknown | transfer_failed).
        """
        end = self._caller.end(deadline_s)
        what = f"transfer {transfer}"
        return self._ask(msg.AwaitTransfer, (transfer,), msg.TransferOver, what, end).tokens

    def drop_transfer(
        self, transfer: str, deadline_s: float | None = None, *, peer: str = ""
    ) -> None:
        """Give a transfer up.

        Args: peer: where its rows would be read, for a producer that has not offered any yet.
        Raises: KvdRefused(destination_busy): a copy still writes; ask again until it does not.
        """
        self._done(
            msg.DropTransfer, (transfer, peer), f"the end of transfer {transfer}", deadline_s
        )

    # Figures ----------------------------------------------------------------------------------

    def stats(
        self,
        values: dict[str, float],
        deadline_s: float | None = None,
        *,
        layers: Sequence[LayerFigures] = (),
        requests: Sequence[RequestFigures] = (),
    ) -> None:
        """Figures that the engine wants to see in status and metrics.

        Args: layers, requests: of decode, `LAYERS_MAX` and `REQUESTS_MAX` at most.
        """
        body = (dict(values), list(layers), list(requests))
        self._done(msg.Stats, body, "stats", deadline_s)

    # Inside -----------------------------------------------------------------------------------

    def _parts(self, count: int) -> Iterator[slice]:
        """Cut a list so that each part fits a batch."""
        core = self._core
        core.check_process()
        with core.lock:
            size = core.require_session().items_max
        for start in range(0, count, size):
            yield slice(start, start + size)

    def _ask(
        self,
        frame: Callable[..., msg.ClientFrame],
        body: tuple[object, ...],
        kind: type[Reply],
        what: str,
        end: int,
    ) -> Reply:
        return self._caller.call(lambda no, token, ms: frame(no, token, ms, *body), kind, what, end)

    def _done(
        self,
        frame: Callable[..., msg.ClientFrame],
        body: tuple[object, ...],
        what: str,
        deadline_s: float | None,
    ) -> None:
        self._ask(frame, body, msg.Done, what, self._caller.end(deadline_s))

    def _statuses(
        self,
        frame: Callable[..., msg.ClientFrame],
        body: tuple[object, ...],
        what: str,
        count: int,
        end: int,
    ) -> list[str]:
        codes = self._ask(frame, body, msg.Statuses, what, end).codes
        if codes and len(codes) != count:
            detail = f"{len(codes)} codes for {count} items of {what}"
            raise KvdRefused("frame_malformed", detail=detail)
        return codes or [""] * count


def _blob(hashes: Sequence[bytes]) -> bytes:
    for at, digest in enumerate(hashes):
        if len(digest) != HASH_BYTES:
            detail = f"hashes[{at}] has {len(digest)} bytes, not {HASH_BYTES}"
            raise KvdRefused("frame_malformed", detail=detail)
    return b"".join(hashes)
