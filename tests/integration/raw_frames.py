"""Frames on engine.sock, byte by byte: well-formed ones to start from, and whoever sends them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import msgpack  # type: ignore[import-untyped]
import pytest
import zmq

from bench.wire_client import WireClient, WireError
from kvd.wire import messages as msg
from kvd.wire.codec import client_codec, server_codec
from kvd.wire.gate_layout import split_word, word_offset
from kvd.wire.layout import BlockLayoutSpec, Part
from kvd.wire.protocol import ENGINE_SOCKET, PROTOCOL
from kvd.wire.slot_items import (
    AcquiredItem,
    ComputedItem,
    LoadEndedItem,
    LoadItem,
    PoisonedItem,
    ReadItem,
    SaveEndedItem,
    SaveItem,
    SlotItem,
    WrittenItem,
)
from tests.integration.live_kvd import LiveKvd

TOKENS: Final = 4
ROW: Final = 16
LAYOUT: Final = BlockLayoutSpec("model", "f16", TOKENS, [[Part("main", ROW)]] * 2)
"""Two layers; a span has 64 bytes, a block 128."""

REPLY_MS: Final = 10_000
HASH: Final = b"\x01" * 32


class Talker:
    """A DEALER that says anything, and counts what it is answered."""

    def __init__(self, runtime_dir: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, REPLY_MS)
        self.socket.connect(f"ipc://{runtime_dir / ENGINE_SOCKET}")
        self._decode = server_codec(64 << 20).decode

    def send(self, *parts: bytes) -> None:
        """Send one message."""
        self.socket.send_multipart(parts)

    def receive(self) -> msg.ServerFrame:
        """The next answer."""
        return self._decode(self.socket.recv())

    def ask(self, *parts: bytes) -> msg.ServerFrame:
        """Send one message, and get its answer."""
        self.send(*parts)
        return self.receive()

    def refusal(self, *parts: bytes) -> msg.Error:
        """Send one message that is refused."""
        reply = self.ask(*parts)
        assert isinstance(reply, msg.Error), reply
        return reply

    def close(self) -> None:
        """Hang up."""
        self.socket.close(linger=0)
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class RawMember(WireClient):
    """An attached member that leaves with a goodbye, so that the next test has room."""

    def raw(self, data: bytes) -> msg.ServerFrame:
        """Send bytes as they are, and get the answer."""
        self.zmq.send(data)
        return self.decode(self.zmq.recv())

    def code(self, frame: msg.ClientFrame) -> str:
        """The code with which a request is refused, '' when it is not."""
        reply = self.raw(self.encode(frame))
        assert reply.request_no == frame.request_no, reply
        return reply.code if isinstance(reply, msg.Error) else ""

    def leave(self) -> None:
        """Say goodbye and drop everything."""
        self.raw(self.encode(msg.Goodbye(*self.head())))
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.zmq.closed:
            self.leave()


class Attach(Protocol):
    """Attaches a member; it leaves when the test ends."""

    def __call__(
        self, engine: str = "e", member: str = "w", *, num_slots: int = 0, device_fd: int = -1
    ) -> RawMember:
        """Attach, as a process without device memory unless its file is given."""


@contextmanager
def attaching(kvd: LiveKvd) -> Iterator[Attach]:
    """Attach members for one test; when they have left, nothing of them is left."""
    with ExitStack() as stack:

        def attach(
            engine: str = "e", member: str = "w", *, num_slots: int = 0, device_fd: int = -1
        ) -> RawMember:
            client = RawMember(
                kvd.runtime_dir, engine, member, num_slots=num_slots, device_fd=device_fd
            )
            return stack.enter_context(client)

        yield attach
    status = kvd.status()
    assert status["invariants"]["ok"], status["invariants"]
    assert status["engines_total"] == 0
    assert kvd.sessions()["member"] == 0


def epochs(client: WireClient, count: int = 3) -> list[int]:
    """Epochs of a member's first slots, from its gate page."""
    assert client.page is not None
    return [split_word(client.page.load_u64(word_offset(slot)))[0] for slot in range(count)]


def digest(number: int) -> bytes:
    """A block hash."""
    return number.to_bytes(32, "big")


def save_block(client: WireClient, request: str, number: int) -> int:
    """Reserve a block, save both layers into it through slot 0, commit it."""
    (block,) = client.reserve(request, 1)
    for layer in range(2):
        (epoch,) = epochs(client, 1)
        items: list[SlotItem] = [
            AcquiredItem(0, epoch, layer),
            WrittenItem(0, epoch, layer, [SaveItem("s", [block], [TOKENS])]),
            SaveEndedItem(0, epoch, "s", True, [TOKENS]),
            ComputedItem(0, epoch),
        ]
        assert client.events(items) == []
    assert client.commit([block], digest(number), [TOKENS]) == []
    return block


def refusal(call: Callable[[], object]) -> WireError:
    """What kvd refuses a call with."""
    with pytest.raises(WireError) as caught:
        call()
    return caught.value


def requests(client: WireClient) -> list[msg.ClientFrame]:
    """One well-formed request of every kind but goodbye, with every optional field given."""

    def head() -> tuple[int, bytes, int]:
        return client.head()

    boot, life = client.attached.boot_id, client.incarnation
    read = ReadItem("t-9", "127.0.0.1:9", 0, 4, [0], [0])
    items: list[SlotItem] = [
        AcquiredItem(0, 0, 0, [LoadItem("r", [1], 4)]),
        LoadEndedItem(0, 0, True),
        WrittenItem(0, 0, 1, [SaveItem("s", [1], [4], ["r"])], [read]),
        ComputedItem(0, 0, True),
        SaveEndedItem(0, 0, "s", True, [4]),
        PoisonedItem(0, 0),
    ]
    announced = [msg.SlotAnnounce(0, 0, True, 0, False, [], 0, [])]
    return [
        msg.Hello(
            *head(),
            PROTOCOL,
            PROTOCOL,
            True,
            0,
            1,
            0,
            0,
            True,
            b"",
            LAYOUT,
            None,
            [],
            announced,
            0,
            "",
            {"model": "m"},
        ),
        msg.Lookup(*head(), "r", HASH, True),
        msg.Reserve(*head(), "r", 1),
        msg.Commit(*head(), [1], HASH, [4], "r"),
        msg.Unpin(*head(), "r", [1]),
        msg.Abort(*head(), "r"),
        msg.Renew(*head(), "r"),
        msg.Events(*head(), boot, life, 0, items),
        msg.Answer(*head(), boot, life, 0, 0, "compute", "engine", "running"),
        msg.Poison(*head(), [1]),
        msg.RegionCreate(*head(), "g", 1, 1, 4, 16),
        msg.RegionDestroy(*head(), "g"),
        msg.Allocated(*head(), "g", [(0, 1)]),
        msg.Expect(*head(), "t-1", "g", [0], 4, 1, 1000),
        msg.AwaitTransfer(*head(), "t-2"),
        msg.DropTransfer(*head(), "t-1"),
        msg.Stats(*head(), {"x": 1.0}),
    ]


def as_list(frame: msg.ClientFrame) -> list[Any]:
    """A frame as the plain values that it is made of."""
    unpacked = msgpack.unpackb(client_codec().encode(frame), strict_map_key=False)
    assert isinstance(unpacked, list)
    return unpacked


def pack(values: object) -> bytes:
    """Plain values as bytes, by another library than kvd's."""
    packed = msgpack.packb(values)
    assert isinstance(packed, bytes)
    return packed


def ext(code: int, data: bytes) -> object:
    """A value of an extension type; msgpack's own time has the code -1."""
    made: object = msgpack.ExtType(code, data) if code >= 0 else msgpack.Timestamp(1, 0)
    return made


def paths(values: Sequence[Any], above: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Where every value of a nested list is, its lists included."""
    for at, value in enumerate(values):
        yield (*above, at)
        if isinstance(value, list):
            yield from paths(value, (*above, at))


def with_value(values: list[Any], path: tuple[int, ...], value: object) -> list[Any]:
    """The nested list with one value exchanged."""
    made = copy.deepcopy(values)
    inner = made
    for at in path[:-1]:
        inner = inner[at]
    inner[path[-1]] = value
    return made


def value_at(values: list[Any], path: tuple[int, ...]) -> object:
    """The value at a path."""
    inner: Any = values
    for at in path:
        inner = inner[at]
    return inner
