"""The control plane against a bare echo through the same stack, interleaved in one run.

* look-up and pin of 1 and of 64 present keys, round trip
* a save's end: received -> the gate word shows the release; and sent -> seen by its owner
* a sleeping shim woken by the gate, against a bare eventfd wake between two processes
* ends of saves in batches (32 items, 8 frames in flight), against one at a time
* the longest callback of kvd's loop, CPU time, while two processes copy memory beside it

    python -m bench.control [--json FILE] [--gate] [--rounds N]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import zmq

from bench.daemon import OwnDaemon, select_pause
from bench.report import Better, Row, argument_parser, compare, finish, measure
from bench.wake import wake_rows
from bench.wire_client import WireClient, simple_layout
from kvd.wire import messages
from kvd.wire.codec import client_codec
from kvd.wire.gate_layout import split_word, word_offset
from kvd.wire.slot_items import ComputedItem, SaveEndedItem, SaveItem, SlotItem, WrittenItem

KEYS: Final = 64
SLOTS: Final = 256
STRIDE: Final = 4
"""Every 4th slot is measured alone; the rest only keep their epochs in step."""

BATCH: Final = 32
WINDOW: Final = 8
ROW_BYTES: Final = 64
CALLBACK_MS_MAX: Final = 5.0
US: Final = 1e-3


class Echo:
    """The echo server in a process of its own, and a socket to it."""

    def __init__(self, directory: Path) -> None:
        path = directory / "echo.sock"
        self._process = subprocess.Popen([sys.executable, "-m", "bench.echo", str(path)])
        while not path.exists():
            select_pause(0.01)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.connect(f"ipc://{path}")

    def close(self) -> None:
        """End it."""
        self.socket.close(linger=0)
        self._context.term()
        self._process.kill()
        self._process.wait()


def round_trip(socket: zmq.Socket[bytes], frame: bytes) -> float:
    """Microseconds from sending a frame to its reply."""
    started = time.perf_counter_ns()
    socket.send(frame)
    socket.recv()
    return (time.perf_counter_ns() - started) * US


def lookups(client: WireClient, echo: Echo, hashes: bytes, rounds: int) -> list[Row]:
    """Look-up and pin of 1 and 64 present keys; the echo gets the same frames."""
    rows = []
    for keys, target in ((1, 1.15), (KEYS, 1.35)):
        ours: list[float] = []
        base: list[float] = []
        for at in range(rounds):
            request = f"lookup-{at % 64}"
            blob = hashes[: 32 * keys]
            frame = client.encode(messages.Lookup(*client.head(), request, blob))
            base.append(round_trip(echo.socket, frame))
            ours.append(round_trip(client.zmq, frame))
            client.unpin(request)
        case = f"look-up + pin of {keys}"
        rows.append(
            compare(case, "round trip", ours, base, unit="us", target=target, better=Better.LOWER)
        )
    return rows


class Slots:
    """Slots that are written and computed, so that the end of a save releases them."""

    def __init__(self, client: WireClient, blocks: Sequence[int]) -> None:
        self._client = client
        self._blocks = blocks
        self.epoch = 0

    def prepare(self) -> None:
        """Arm a save in every slot of this epoch."""
        for low in range(0, SLOTS, BATCH):
            some = range(low, low + BATCH)
            written: list[SlotItem] = [
                WrittenItem(s, self.epoch, 0, [SaveItem("save", [self._blocks[s]], [128])])
                for s in some
            ]
            computed: list[SlotItem] = [ComputedItem(s, self.epoch) for s in some]
            refused = self._client.events(written) + self._client.events(computed)
            if refused:
                raise RuntimeError(f"slot events were refused: {refused}")

    def ends(self, low: int, count: int) -> list[SlotItem]:
        """The ends of the saves of some slots."""
        return [SaveEndedItem(s, self.epoch, "save", True) for s in range(low, low + count)]

    def wait_released(self, slot: int) -> None:
        """Until the gate word shows the next epoch."""
        page = self._client.page
        assert page is not None
        offset = word_offset(slot)
        while split_word(page.load_u64(offset))[0] <= self.epoch:
            pass


def gate(daemon: OwnDaemon, client: WireClient, echo: Echo, slots: Slots, rounds: int) -> list[Row]:
    """The end of a save opens its gate.

    From the receipt of `save_ended` in kvd until the released word is stored (kvd's own clock), and
    for information from sending it until an owner that polls the word sees it: on two cores that
    owner takes the processor from the threads that it waits for, so the two are measured apart.
    """
    frame = client_codec().encode(messages.Renew(*client.head(), "nobody"))
    seen: list[float] = []
    base: list[float] = []
    received: list[float] = []
    while len(seen) < rounds:
        slots.prepare()
        stores, seconds = gate_figures(daemon)
        for slot in range(0, SLOTS, STRIDE):
            base.append(round_trip(echo.socket, frame))
            client.events(slots.ends(slot, 1))
        stored, until = gate_figures(daemon)
        received.append(1e6 * (until - seconds) / (stored - stores))
        for slot in range(1, SLOTS, STRIDE):
            event = client.encode(client.events_frame(slots.ends(slot, 1)))
            started = time.perf_counter_ns()
            client.zmq.send(event)
            slots.wait_released(slot)
            seen.append((time.perf_counter_ns() - started) * US)
            _seen_one(client)
            client.events(slots.ends(slot + 1, STRIDE - 2))
        slots.epoch += 1
    lower = Better.LOWER
    return [
        compare(
            "save_ended received -> gate word stored",
            f"mean of {SLOTS // STRIDE}, in kvd",
            received,
            base,
            unit="us",
            target=0.6,
            better=lower,
        ),
        compare("save_ended sent -> seen by a polling owner", "latency", seen, base, unit="us"),
    ]


def _seen_one(client: WireClient) -> None:
    reply = client.decode(client.zmq.recv())
    assert isinstance(reply, messages.Seen), reply
    client.next_no = reply.next_no


def gate_figures(daemon: OwnDaemon) -> tuple[float, float]:
    """Gate words stored on frames so far, and the time from their receipt, seconds."""
    status, document = daemon.get("/v1/status")
    assert status == 200
    process = document["process"]
    return process["gate_stores"], process["gate_store_seconds"]


def batches(client: WireClient, slots: Slots, rounds: int) -> list[Row]:
    """Ends of saves one at a time, and 32 a frame with 8 frames in flight.

    Every one is a real transition: it releases a slot that was written and computed before.
    """
    single: list[float] = []
    batched: list[float] = []
    for _ in range(rounds):
        slots.prepare()
        started = time.perf_counter()
        for slot in range(SLOTS):
            client.events(slots.ends(slot, 1))
        single.append(SLOTS / (time.perf_counter() - started))
        slots.epoch += 1
        slots.prepare()
        started = time.perf_counter()
        _stream(client, slots)
        batched.append(SLOTS / (time.perf_counter() - started))
        slots.epoch += 1
    case = f"save_ended, {BATCH} a frame, {WINDOW} in flight"
    return [compare(case, "rate", batched, single, unit="1/s", target=12.0)]


def _stream(client: WireClient, slots: Slots) -> None:
    """End the saves of all slots, so many frames in flight."""
    number = client.next_no
    in_flight = 0
    for low in range(0, SLOTS, BATCH):
        frame = client.events_frame(slots.ends(low, BATCH), number)
        client.zmq.send(client.encode(frame))
        number += BATCH
        in_flight += 1
        if in_flight == WINDOW:
            _seen(client)
            in_flight -= 1
    for _ in range(in_flight):
        _seen(client)
    client.next_no = number


def _seen(client: WireClient) -> None:
    reply = client.decode(client.zmq.recv())
    assert isinstance(reply, messages.Seen), reply
    assert not reply.codes, reply


def loop_under_copies(daemon: OwnDaemon, client: WireClient, slots: Slots) -> list[Row]:
    """The longest callback of kvd's loop while two processes copy and events stream in."""
    copiers = [subprocess.Popen([sys.executable, "-m", "bench.copier"]) for _ in range(2)]
    longest: list[float] = []
    try:
        for _ in range(40):
            slots.prepare()
            for low in range(0, SLOTS, BATCH):
                client.events(slots.ends(low, BATCH))
            slots.epoch += 1
            status, document = daemon.get("/v1/status")
            assert status == 200
            longest.append(1e3 * document["process"]["loop_callback_cpu_seconds_max"])
    finally:
        for copier in copiers:
            copier.kill()
            copier.wait()
    return [
        measure(
            "loop callback beside two copies",
            "CPU time, longest so far",
            longest[-1:],
            unit="ms",
            target=CALLBACK_MS_MAX,
            better=Better.LOWER,
        )
    ]


def run(rounds: int) -> list[Row]:
    """All figures."""
    with tempfile.TemporaryDirectory() as scratch, OwnDaemon("pool.size=64MiB") as daemon:
        echo = Echo(Path(scratch))
        client = WireClient(daemon.runtime_dir, num_slots=SLOTS)
        try:
            client.hello(simple_layout(row_bytes=ROW_BYTES))
            blocks = client.reserve("held", SLOTS)
            slots = Slots(client, blocks)
            slots.prepare()
            for low in range(0, SLOTS, BATCH):
                client.events(slots.ends(low, BATCH))
            slots.epoch += 1
            keyed = client.reserve("keyed", KEYS)
            hashes = _store(client, keyed, slots)
            rows = lookups(client, echo, hashes, rounds)
            rows += gate(daemon, client, echo, slots, rounds)
            rows += wake_rows(rounds)
            rows += batches(client, slots, max(5, rounds // 60))
            rows += loop_under_copies(daemon, client, slots)
        finally:
            client.close()
            echo.close()
    return rows


def _store(client: WireClient, blocks: Sequence[int], slots: Slots) -> bytes:
    """Make blocks ready under random keys; returns the keys."""
    hashes = os.urandom(32 * len(blocks))
    save = SaveItem("save", list(blocks), [128] * len(blocks))
    epoch = slots.epoch
    items: list[SlotItem] = [WrittenItem(0, epoch, 0, [save]), ComputedItem(0, epoch)]
    refused = client.events([*items, SaveEndedItem(0, epoch, "save", True)])
    if refused:
        raise RuntimeError(f"storing was refused: {refused}")
    client.commit(blocks, hashes, [128] * len(blocks))
    client.unpin("keyed")
    # Slot 0 is one epoch ahead now; the others follow.
    for low in range(1, SLOTS, BATCH):
        some = range(low, min(low + BATCH, SLOTS))
        client.events([ComputedItem(s, epoch) for s in some])
    slots.epoch += 1
    return hashes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench."""
    parser = argument_parser(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=600, help="samples of each figure")
    arguments = parser.parse_args(argv)
    return finish("control plane", run(arguments.rounds), arguments)


if __name__ == "__main__":
    sys.exit(main())
