"""The block index among a million keys, and how fast the books are made again from the headers.

* look-up of 1024 keys that a running kvd has among so many, against a bare echo of the same frames
* the native index against a dict, in one process: look-ups and puts
* headers of an earlier life -> columns -> index and block table, as at a restart
* the longest pause of the collector meanwhile, and of a full pass with all of it alive
* a kvd with so many keys after kill -9: start to ready, every key a hit again

    python -m bench.index [--json FILE] [--gate] [--keys N] [--rounds N] [--restarts N]
"""

from __future__ import annotations

import gc
import os
import random
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from bench.control import Echo, round_trip
from bench.daemon import OwnDaemon
from bench.report import Better, Row, argument_parser, compare, finish, measure
from bench.startup import processor_seconds
from bench.wire_client import WireClient, simple_layout
from kvd.core.block_columns import BlockColumns
from kvd.core.blocks import BlockShape, BlockTable
from kvd.core.evictions import make_policy
from kvd.core.ids import RequestKey
from kvd.core.prefix import HASH_BYTES, BlockIndex
from kvd.core.state import Settings
from kvd.memory.adopt_scan import scan_ready
from kvd.memory.layout_v1 import (
    HEADER_BYTES,
    SUPERBLOCK_BYTES,
    BlockState,
    MetaTable,
    Superblock,
    meta_bytes,
)
from kvd.store.dict_index import DictIndex
from kvd.store.native_index import NativeIndex
from kvd.store.native_queues import NativeQueues
from kvd.wire import messages
from kvd.wire.slot_items import ComputedItem, SaveEndedItem, SaveItem, SlotItem, WrittenItem
from kvd_kernels.host import Mapping, crc32c

KEYS: Final = 1_000_000
ROUNDS: Final = 200
ASKED: Final = 1024
ROW_BYTES: Final = 64  # the smallest block there is: a row of one token
RESERVE: Final = 32_768
COMMIT: Final = 256

ECHO_RATIO_MAX: Final = 2.5
DICT_RATIO_MAX: Final = 0.5
SCAN_MS_MAX: Final = 1000.0
TABLE_MS_MAX: Final = 500.0
PAUSE_MS_MAX: Final = 10.0
READY_SECONDS_MAX: Final = 1.0
_BODY: Final = struct.Struct("<I32s32sII44x")


class Asked:
    """Questions of 1024 present keys each, of one chain or drawn from all."""

    def __init__(self, keys: bytes) -> None:
        """keys: [n, 32], in the order in which they were stored."""
        self._keys = keys
        self.count = len(keys) // HASH_BYTES
        self._random = random.Random(1)
        self.size = min(ASKED, self.count)

    def chain(self) -> bytes:
        """Keys that were stored one after the other, as those of a prompt are."""
        start = self._random.randrange(self.count - self.size + 1) * HASH_BYTES
        return self._keys[start : start + self.size * HASH_BYTES]

    def scattered(self) -> bytes:
        """Keys from anywhere."""
        picked = self._random.sample(range(self.count), self.size)
        return b"".join(self._keys[at * 32 : at * 32 + 32] for at in picked)


# A running kvd ------------------------------------------------------------------------------------


def store(client: WireClient, count: int) -> bytes:
    """Make blocks ready under random keys; returns the keys."""
    keys = os.urandom(HASH_BYTES * count)
    done = 0
    for epoch, low in enumerate(range(0, count, RESERVE)):
        blocks = client.reserve(f"store-{low}", min(RESERVE, count - low))
        save = SaveItem("save", blocks, [1] * len(blocks))
        items: list[SlotItem] = [WrittenItem(0, epoch, 0, [save]), ComputedItem(0, epoch)]
        refused = client.events([*items, SaveEndedItem(0, epoch, "save", True)])
        if refused:
            raise RuntimeError(f"storing was refused: {refused}")
        for at in range(0, len(blocks), COMMIT):
            some = blocks[at : at + COMMIT]
            hashes = keys[done * HASH_BYTES : (done + len(some)) * HASH_BYTES]
            codes = client.commit(some, hashes, [1] * len(some))
            if any(codes):
                raise RuntimeError(f"commits were refused: {set(codes)}")
            done += len(some)
        client.unpin(f"store-{low}")
    return keys


def served(count: int, rounds: int, times: int) -> list[Row]:
    """Look-ups in a running kvd against the echo, interleaved; then kvd is killed and restarted."""
    blocks = count + count // 4  # so that nothing is evicted at high water
    settings = (
        f"pool.size={blocks * ROW_BYTES}B",
        f"pool.block_count_max={blocks}",
        "pool.headroom=0B",
        "pool.owner=holder",
        "pool.hold_ttl=2s",
    )
    with tempfile.TemporaryDirectory() as scratch, OwnDaemon(*settings) as daemon:
        echo = Echo(Path(scratch))
        client = WireClient(daemon.runtime_dir, num_slots=1)
        try:
            client.hello(simple_layout(row_bytes=ROW_BYTES, block_tokens=1))
            asked = Asked(store(client, count))
            rows = []
            for name, draw in (("one chain", asked.chain), ("anywhere", asked.scattered)):
                for pin in (False, True):
                    rows.append(_lookups(client, echo, name, draw, rounds, pin=pin))
        finally:
            client.close()
            echo.close()
        return rows + _restart(daemon, asked, times)


def _restart(daemon: OwnDaemon, asked: Asked, times: int) -> list[Row]:
    """kill -9 of kvd, and how soon the next life is ready with every key."""
    ready, spent = [], []
    for _ in range(times):
        daemon.stop(signal.SIGKILL)
        started = time.perf_counter()
        daemon.start()
        ready.append(time.perf_counter() - started)
        assert daemon.process is not None
        spent.append(processor_seconds(daemon.process.pid))
    client = WireClient(daemon.runtime_dir, num_slots=1)
    try:
        client.hello(simple_layout(row_bytes=ROW_BYTES, block_tokens=1))
        found = client.lookup("again", asked.scattered(), pin=False)
        if len(found) != asked.size:
            raise RuntimeError(f"only {len(found)} keys are hits after a restart")
    finally:
        client.close()
    case = f"kvd with {asked.count:,} keys, after kill -9"
    limit, lower = READY_SECONDS_MAX, Better.LOWER
    return [
        measure(case, "start to ready", ready, unit="s", target=limit, better=lower),
        measure(case, "processor, to ready", spent, unit="s"),
    ]


def _lookups(
    client: WireClient,
    echo: Echo,
    name: str,
    draw: Callable[[], bytes],
    rounds: int,
    *,
    pin: bool,
) -> Row:
    ours: list[float] = []
    base: list[float] = []
    for at in range(rounds):
        hashes = draw()
        frame = client.encode(messages.Lookup(*client.head(), f"ask-{at}", hashes, pin))
        base.append(round_trip(echo.socket, frame))
        ours.append(round_trip(client.zmq, frame))
        if pin:
            client.unpin(f"ask-{at}")
        if at == 0:
            found = client.lookup("check", hashes, pin=False)
            if len(found) != len(hashes) // HASH_BYTES:
                raise RuntimeError(f"only {len(found)} keys were found")
    what = f"look-up{' + pin' if pin else ''} of {len(hashes) // HASH_BYTES}, {name}"
    target = ECHO_RATIO_MAX
    return compare(what, "round trip", ours, base, unit="us", target=target, better=Better.LOWER)


# In one process -----------------------------------------------------------------------------------


def indexes(keys: bytes, rounds: int) -> list[Row]:
    """The native index against the dict, look-ups interleaved."""
    native, plain = NativeIndex(), DictIndex()
    native.clear(len(keys) // HASH_BYTES)
    puts = [_put_all(index, keys) for index in (native, plain)]
    asked = Asked(keys)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        hashes = asked.scattered()
        for index, spent in ((plain, times[1]), (native, times[0])):
            started = time.perf_counter_ns()
            found = index.prefix(0, hashes)
            spent.append((time.perf_counter_ns() - started) / 1e3)
            assert len(found) == asked.size
    case = f"native index against a dict, {len(native):,} keys"
    what = f"prefix of {asked.size}"
    lower, target = Better.LOWER, DICT_RATIO_MAX
    return [
        compare(case, what, *times, unit="us", target=target, better=lower),
        compare(case, "put", *puts, unit="ns"),
        measure(case, "address space", [native.slot_bytes / len(native)], unit="B/key"),
    ]


def _put_all(index: BlockIndex, keys: bytes) -> list[float]:
    """Put all keys; returns nanoseconds for each of ten parts."""
    count = len(keys) // HASH_BYTES
    spent = []
    for part in range(10):
        low, high = count * part // 10, count * (part + 1) // 10
        started = time.perf_counter_ns()
        for block in range(low, high):
            index.put(0, keys[block * HASH_BYTES : (block + 1) * HASH_BYTES], block)
        spent.append((time.perf_counter_ns() - started) / max(1, high - low))
    return spent


@contextmanager
def headers(keys: bytes) -> Iterator[Mapping]:
    """Metadata of a pool whose blocks are all ready."""
    count = len(keys) // HASH_BYTES
    fd = os.memfd_create("bench-meta", os.MFD_CLOEXEC)
    os.ftruncate(fd, meta_bytes(count))
    mapping = Mapping(fd, meta_bytes(count), writable=True)
    os.close(fd)
    shape = Superblock(ROW_BYTES, count, ROW_BYTES * count, bytes(HASH_BYTES))
    MetaTable.format(mapping, shape, fresh=True)
    state = BlockState.READY.value.to_bytes(4, "little")
    step = 8192
    for low in range(0, count, step):
        packed = []
        for block in range(low, min(low + step, count)):
            key = keys[block * HASH_BYTES : (block + 1) * HASH_BYTES]
            body = _BODY.pack(1, b"n" * HASH_BYTES, key, 1, 0)
            packed += [state, body, crc32c(body).to_bytes(4, "little")]
        mapping.write_bytes(SUPERBLOCK_BYTES + low * HEADER_BYTES, b"".join(packed))
    try:
        yield mapping
    finally:
        mapping.close()


class Pauses:
    """Durations of the collector's passes, ms, while it is entered."""

    def __init__(self) -> None:
        self.ms: list[float] = []
        self._started = 0

    def _on(self, phase: Literal["start", "stop"], _: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.perf_counter_ns()
        else:
            self.ms.append((time.perf_counter_ns() - self._started) / 1e6)

    def __enter__(self) -> Pauses:
        gc.callbacks.append(self._on)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._on)


def restarts(keys: bytes, times: int) -> list[Row]:
    """Headers into columns, these into index and table, as often as makes a median."""
    scans: list[float] = []
    tables: list[float] = []
    # As kvd does before it is ready: a pass looks at what was made since, not at every library.
    gc.collect()
    gc.freeze()
    with headers(keys) as mapping, Pauses() as pauses:
        for _ in range(times):
            started = time.perf_counter_ns()
            found = scan_ready(mapping, (b"n" * HASH_BYTES,), 1)
            scans.append((time.perf_counter_ns() - started) / 1e6)
            started = time.perf_counter_ns()
            table = rebuilt(found.columns)
            tables.append((time.perf_counter_ns() - started) / 1e6)
            assert len(table.policy) == len(table.index) == len(keys) // HASH_BYTES
            gc.collect()
    gc.unfreeze()
    case = f"restart with {len(keys) // HASH_BYTES:,} blocks"
    lower, limit = Better.LOWER, PAUSE_MS_MAX
    worst = [max(pauses.ms)]
    return [
        measure(case, "scan of headers", scans, unit="ms", target=SCAN_MS_MAX, better=lower),
        measure(case, "index and table", tables, unit="ms", target=TABLE_MS_MAX, better=lower),
        measure(case, "longest pause of gc", worst, unit="ms", target=limit, better=lower),
    ]


def rebuilt(columns: BlockColumns) -> BlockTable:
    """A table and its index as a restarted kvd makes them."""
    total = len(columns)
    index = NativeIndex()
    index.clear(total)
    policy = make_policy(Settings().eviction, total, NativeQueues)
    table = BlockTable(total, BlockShape(1, 1), index, policy, columns)
    table.adopt(RequestKey("", "last life"))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench."""
    parser = argument_parser(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--keys", type=int, default=KEYS, metavar="N", help=f"default {KEYS}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="samples of each look-up")
    parser.add_argument("--restarts", type=int, default=5, help="samples of each restart")
    arguments = parser.parse_args(argv)
    keys = os.urandom(HASH_BYTES * arguments.keys)
    rows = restarts(keys, arguments.restarts)
    rows += indexes(keys, arguments.rounds)
    rows += served(arguments.keys, arguments.rounds, arguments.restarts)
    return finish("block index", rows, arguments)


if __name__ == "__main__":
    sys.exit(main())
