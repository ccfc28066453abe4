"""An engine of the soak: it saves blocks whose every byte follows from their key, and looks again.

`python -m bench.soak_engine NAME RUNTIME_DIR JOURNAL SEED` works until it is killed. Before each
step that changes what kvd must know, and after kvd acknowledged it, it writes a line to its
journal, so that whoever reads the journals knows what must be a hit, and with which bytes:

    try KEY    it is about to commit        ok KEY     the commit was acknowledged
    drop KEY   it is about to poison        gone KEY   kvd said done
    wrong KEY  a hit had other bytes        back S     attached again after S seconds
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from engine_shim.client import ClientOptions, KvdClient, MemberIdentity, SlotQuarantined
from engine_shim.client.errors import KvdRefused
from kvd.plan.layout import BlockLayout
from kvd.wire.layout import BlockLayoutSpec, Part
from kvd.wire.slot_items import SaveItem

NUM_LAYERS: Final = 2
NUM_SLOTS: Final = 3
BLOCK_TOKENS: Final = 16
SPEC: Final = BlockLayoutSpec(
    "soak", "uint8", BLOCK_TOKENS, [[Part("main", 256)] for _ in range(NUM_LAYERS)]
)
STABLE: Final = 40
"""Keys that are never given up, so that whoever checks finds the most of what a journal says."""

KEPT_MAX: Final = 60
"""Keys that an engine keeps; the pool has room for all of every engine, so none is evicted."""

_QUICK: Final = ClientOptions(deadline_s=5.0, reconnect_deadline_s=60.0)


def block_hash(key: str) -> bytes:
    """The hash of a key's block."""
    return hashlib.sha256(key.encode()).digest()


def content(key: str, layer: int, length: int) -> bytes:
    """The only right bytes of one span of a key's block."""
    unit = hashlib.blake2b(f"{key}/{layer}".encode()).digest()
    return (unit * (length // len(unit) + 1))[:length]


def spans() -> list[tuple[int, int]]:
    """(offset, length) of each layer in a block."""
    layout = BlockLayout(SPEC)
    found = [layout.spans(layer)[0] for layer in range(NUM_LAYERS)]
    return [(span.offset, span.row_bytes * BLOCK_TOKENS) for span in found]


def is_right(client: KvdClient, key: str, block: int) -> bool:
    """Whether a pinned block holds the bytes of a key.

    Raises: KvdRefused(pool_lost): kvd died meanwhile, nobody can tell.
    """
    pool = client.pool
    if pool is None:
        raise KvdRefused("pool_lost", what=key)
    base = block * client.block_stride
    return all(
        pool.read_bytes(base + offset, length) == content(key, layer, length)
        for layer, (offset, length) in enumerate(spans())
    )


def read_journal(path: Path) -> tuple[set[str], set[str], list[str]]:
    """Keys that must be hits, keys that may be gone or not, and what was wrong."""
    kept: set[str] = set()
    unsure: set[str] = set()
    wrong: list[str] = []
    for line in path.read_text(encoding="ascii").splitlines():
        what, _, key = line.partition(" ")
        if what == "try":
            unsure.add(key)
        elif what == "ok":
            unsure.discard(key)
            kept.add(key)
        elif what in ("drop", "gone"):
            kept.discard(key)
            unsure.add(key)
        elif what == "wrong":
            wrong.append(key)
    return kept, unsure, wrong


@dataclass
class SoakEngine:
    """One life of an engine."""

    name: str
    client: KvdClient
    journal: Path
    draw: random.Random
    keys: list[str] = field(default_factory=list)
    count: int = 0
    attaches: int = 1

    def write(self, what: str, text: object) -> None:
        """One line, at once."""
        with self.journal.open("a", encoding="ascii") as file:
            file.write(f"{what} {text}\n")

    def work(self) -> None:
        """One step after another, whatever becomes of kvd."""
        while True:
            self.count += 1
            try:
                self._step()
            except (KvdRefused, SlotQuarantined):
                self._come_back()

    def _come_back(self) -> None:
        client = self.client
        client.wait_attached(60.0)
        seen = client.statistics()
        if seen.attaches != self.attaches:
            self.attaches = seen.attaches
            self.write("back", f"{seen.last_reattach_s:.3f}")

    def _step(self) -> None:
        request = f"{self.client.generation}.{self.count}"
        try:
            if self.keys and self.draw.random() < 0.5:
                self._look(request, self.draw.choice(self.keys))
            elif len(self.keys) >= KEPT_MAX:
                self._drop(request)
            else:
                self._save(request)
        finally:
            self.client.abort(request)

    def _look(self, request: str, key: str) -> None:
        found = self.client.lookup(request, [block_hash(key)])
        if not found:
            self.write("wrong", f"{key} missed")
        elif not is_right(self.client, key, found[0]):
            # Whoever reads trusts what it read only if kvd kept the block until now.
            self.client.renew(request)
            self.write("wrong", key)

    def _drop(self, request: str) -> None:
        key = self.keys[STABLE]
        found = self.client.lookup(request, [block_hash(key)])
        self.write("drop", key)
        self.keys.pop(STABLE)  # from now on it may be gone, whether kvd's answer comes or not
        self.client.poison(found)
        self.write("gone", key)

    def _save(self, request: str) -> None:
        client = self.client
        stem = f"{self.name}.{os.getpid()}-{self.count}"
        made = [f"{stem}-{at}" for at in range(self.draw.randint(1, 3))]
        blocks = client.reserve(request, len(made))
        for layer, (offset, length) in enumerate(spans()):
            tenancy = client.slots.acquire(layer % NUM_SLOTS, layer)
            save = SaveItem("s", blocks, [BLOCK_TOKENS] * len(blocks), [request] * len(blocks))
            ok = False
            client.slots.written(tenancy, layer, [save])
            try:
                client.slots.save_started(tenancy, "s")
                assert client.pool is not None
                for key, block in zip(made, blocks, strict=True):
                    base = block * client.block_stride + offset
                    client.pool.write_bytes(base, content(key, layer, length))
                ok = True
            finally:
                client.slots.save_ended(tenancy, "s", ok)
                client.slots.computed(tenancy, ok)
        client.flush()
        if self.draw.random() < 0.2:
            return  # never committed: nobody may find it
        for key in made:
            self.write("try", key)
        codes = client.commit(blocks, [block_hash(k) for k in made], [BLOCK_TOKENS] * len(made))
        for key, code in zip(made, codes or [""] * len(made), strict=True):
            if not code:
                self.keys.append(key)
                self.write("ok", key)


def identity(name: str, *, num_slots: int = NUM_SLOTS) -> MemberIdentity:
    """A scheduler and worker in one."""
    return MemberIdentity(
        name,
        "rank0",
        is_scheduler=True,
        rank=0,
        contributes=True,
        layout=SPEC,
        num_slots=num_slots,
    )


def main(name: str, runtime_dir: str, journal: str, seed: str) -> None:
    """Work until killed."""
    draw = random.Random(int(seed))
    with KvdClient(identity(name), runtime_dir, _QUICK) as client:
        path = Path(journal)
        path.touch()
        # What an earlier life of the engine saved is its business, too.
        SoakEngine(name, client, path, draw, sorted(read_journal(path)[0])).work()


if __name__ == "__main__":
    main(*sys.argv[1:])
