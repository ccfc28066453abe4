"""A kvd that a test scripts: real sockets, a real gate page, no decisions of its own."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import zmq

from kvd.memory.gate_page import GatePage
from kvd.server import seqpacket
from kvd.wire import attach
from kvd.wire import messages as msg
from kvd.wire import slot_items as items
from kvd.wire.codec import attach_reply_codec, attach_request_codec, client_codec, server_codec
from kvd.wire.gate_layout import STATE_FREE, STATE_HELD
from kvd.wire.protocol import BOOT_ID_BYTES, TOKEN_BYTES

POOL_BYTES: Final = 1 << 16

Frame = TypeVar("Frame", bound=msg.Request)
Answer = msg.ServerFrame | bytes | None
AttachHandler = Callable[[attach.AttachMember], attach.AttachReply | bytes | None]


def raw(value: object) -> bytes:
    """Any value as a frame."""
    return msgspec.msgpack.encode(value)


class FakeKvd:
    """Answers as told; one thread serves both sockets.

    `told` has the items as they came; `seen` what they say, event by event.
    """

    def __init__(
        self,
        directory: Path,
        pool_fd: int = -1,
        prepare: Callable[[FakeKvd], object] | None = None,
    ) -> None:
        """Listen, and serve.

        Args:
            pool_fd: memory of an earlier life, its own from now on; -1 for new memory.
            prepare: called before anybody is answered.
        """
        self.directory = directory
        self.boot_id = os.urandom(BOOT_ID_BYTES)
        self.next_no = 0
        self._codes: dict[int, str] = {}
        self.words: dict[int, tuple[int, int]] = {}
        self.seen: list[items.SlotItem] = []
        self.told: list[items.SlotItem] = []
        self._steps: dict[int, items.StepOpenedItem] = {}
        self.frames: list[msg.ClientFrame] = []
        self.hellos: list[msg.Hello] = []
        self.attaches: list[attach.AttachMember] = []
        self._handlers: dict[type, Callable[[Any], Answer]] = {}
        self.on_attach: AttachHandler | None = None
        self.code_of: Callable[[items.SlotItem], str] = lambda item: ""
        self.items_max = 1024
        self.frame_bytes_max = 4 << 20
        self.pool_bytes = POOL_BYTES
        self.page_boot_id = self.boot_id
        self.slots = 0
        self.page: GatePage | None = None
        self._event_fd = -1
        if pool_fd < 0:
            pool_fd = os.memfd_create("fake-pool", os.MFD_CLOEXEC)
            os.ftruncate(pool_fd, POOL_BYTES)
        self._pool_fd = pool_fd
        self._token = b""
        self._peer = b""
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._connections: dict[int, socket.socket] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(f"ipc://{directory / 'engine.sock'}")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(directory / "attach.sock"))
        self._listener.listen(8)
        self._is_running = True
        self._thread = threading.Thread(target=self._run, name="fake-kvd")
        if prepare is not None:
            prepare(self)
        self._thread.start()

    # For tests --------------------------------------------------------------------------------

    def on(self, kind: type[Frame], handler: Callable[[Frame], Answer]) -> None:
        """Answer frames of one kind so; None is silence."""
        self._handlers[kind] = handler

    def silent_on(self, kind: type[Frame]) -> list[Frame]:
        """Answer frames of one kind not at all; they gather in the list."""
        asked: list[Frame] = []
        self._handlers[kind] = asked.append
        return asked

    def as_usual(self, kind: type[msg.Request]) -> None:
        """Forget what `on` or `silent_on` said."""
        del self._handlers[kind]

    def answer_late(self, frame: msg.ClientFrame) -> None:
        """Answer a frame that was met with silence."""
        self.do(lambda: self._send(self.usual(frame)))

    def do(self, job: Callable[[], None]) -> None:
        """Run a job on the fake's thread and wait for it."""
        done = threading.Event()
        self._jobs.put(job)
        self._jobs.put(done.set)
        os.eventfd_write(self._wake, 1)
        assert done.wait(5)

    def free(self, slot: int, epoch: int) -> None:
        """Publish a slot as free."""
        self.publish(slot, epoch, STATE_FREE)

    def publish(self, slot: int, epoch: int, state: int) -> None:
        """Store a word and wake the member."""

        def job() -> None:
            self.words[slot] = (epoch, state)
            if self.page is not None:
                self.page.set(slot, epoch, state)
                os.eventfd_write(self._event_fd, 1)

        self.do(job)

    def hang_up(self) -> None:
        """Close every attach connection."""
        self.do(self._hang_up)

    def tell(self, frame: msg.ServerFrame | bytes) -> None:
        """Send a frame that nobody asked for."""
        self.do(lambda: self._send(frame))

    def of(self, kind: type[Frame]) -> list[Frame]:
        """Frames of one kind that came so far."""
        return [frame for frame in self.frames if isinstance(frame, kind)]

    def stop(self) -> None:
        """End as a killed daemon does: sockets close, their files stay."""
        if not self._is_running:
            return
        self._is_running = False
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._hang_up()
        self._listener.close()
        self._context.destroy(linger=0)
        os.close(self._pool_fd)
        os.close(self._wake)
        self._drop_page()

    def successor(
        self, *, keeps_memory: bool = False, prepare: Callable[[FakeKvd], object] | None = None
    ) -> FakeKvd:
        """Start another life of kvd in the same directory; prepare: before anybody meets it."""
        pool_fd = os.dup(self._pool_fd) if keeps_memory else -1
        self.stop()
        for name in ("attach.sock", "engine.sock"):
            (self.directory / name).unlink(missing_ok=True)
        return FakeKvd(self.directory, pool_fd, prepare)

    # Inside -----------------------------------------------------------------------------------

    def _hang_up(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _drop_page(self) -> None:
        if self.page is not None:
            self.page.close()
            os.close(self._event_fd)
            self.page = None

    def _run(self) -> None:
        while self._is_running:
            poller = zmq.Poller()
            poller.register(self._router, zmq.POLLIN)
            for fd in (self._wake, self._listener.fileno(), *self._connections):
                poller.register(fd, zmq.POLLIN)
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
                while not self._jobs.empty():
                    self._jobs.get()()
            if self._router in ready:
                self._peer, data = self._router.recv_multipart()
                self._frame(client_codec(64 << 20).decode(data))
            if self._listener.fileno() in ready:
                connection, _ = self._listener.accept()
                self._connections[connection.fileno()] = connection
            for fd, connection in list(self._connections.items()):
                if fd in ready:
                    with suppress(ConnectionError):  # it may have given up meanwhile
                        self._attach(connection)

    def _attach(self, connection: socket.socket) -> None:
        data, fds, _ = seqpacket.receive(connection)
        seqpacket.close_all(fds)
        if not data:
            self._connections.pop(connection.fileno(), None)
            connection.close()
            return
        message = attach_request_codec().decode(data)
        if isinstance(message, attach.MapRegion):
            mapped = attach_reply_codec().encode(attach.Mapped(POOL_BYTES))
            seqpacket.send(connection, mapped, [self._pool_fd])
            return
        assert isinstance(message, attach.AttachMember)
        self.attaches.append(message)
        if self.on_attach is not None:
            reply = self.on_attach(message)
            if reply is not None:
                raw = reply if isinstance(reply, bytes) else attach_reply_codec().encode(reply)
                seqpacket.send(connection, raw)
            return
        self._welcome(connection, message)

    def _welcome(self, connection: socket.socket, message: attach.AttachMember) -> None:
        self._drop_page()
        self.slots = message.num_slots
        handed = []
        if message.num_slots:
            self.page = GatePage(message.num_slots, self.page_boot_id)
            self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            handed = [self.page.fd, self._event_fd]
        if self.pool_bytes:
            handed.append(self._pool_fd)
        self._token = os.urandom(TOKEN_BYTES)
        size = self.page.size if self.page is not None else 0
        reply = attach.Attached(1, self.boot_id, self._token, self.pool_bytes, size)
        seqpacket.send(connection, attach_reply_codec().encode(reply), handed)

    def _frame(self, frame: msg.ClientFrame) -> None:
        self.frames.append(frame)
        if isinstance(frame, msg.Hello):
            self.hellos.append(frame)
        handler = self._handlers.get(type(frame))
        reply = handler(frame) if handler is not None else self.usual(frame)
        if reply is not None:
            self._send(reply)

    def usual(self, frame: msg.ClientFrame) -> msg.ServerFrame:
        """What a kvd that agrees with everything answers."""
        number, boot = frame.request_no, self.boot_id
        if frame.token != self._token:
            return msg.Error(number, boot, "unauthorized")
        match frame:
            case msg.Hello():
                return self._hello_ok(frame)
            case msg.Events():
                return self._take(frame)
            case msg.Lookup() | msg.Reserve():
                kind = msg.Found if isinstance(frame, msg.Lookup) else msg.Taken
                return kind(number, boot, [1, 2])
            case msg.Commit() | msg.Allocated():
                return msg.Statuses(number, boot)
            case msg.AwaitTransfer():
                return msg.TransferOver(number, boot, 7)
            case _:
                return msg.Done(number, boot)

    def _hello_ok(self, frame: msg.Hello) -> msg.HelloOk:
        epochs = []
        for slot in range(self.slots):
            said = next((s for s in frame.slots if s.slot == slot), None)
            if said is not None and slot not in self.words:
                busy = said.computing or bool(said.savers) or bool(said.reads)
                epoch = said.acquired if busy else max(said.word_epoch, said.acquired + 1)
                self.words[slot] = (epoch, STATE_HELD if busy else STATE_FREE)
            epoch, state = self.words.setdefault(slot, (0, STATE_FREE))
            assert self.page is not None
            self.page.set(slot, epoch, state)
            epochs.append(epoch)
        number, boot = frame.request_no, self.boot_id
        sizes = (self.frame_bytes_max, self.items_max)
        return msg.HelloOk(number, boot, 1, 4, 4096, epochs, self.next_no, *sizes)

    def _take(self, frame: msg.Events) -> msg.ServerFrame:
        number, boot = frame.request_no, self.boot_id
        if frame.first_no > self.next_no:
            context = {"got": str(frame.first_no), "want": str(self.next_no)}
            return msg.Error(number, boot, "out_of_order", context)
        for item in frame.items[self.next_no - frame.first_no :]:
            parts = self._parts(item)
            self._codes[self.next_no] = next(filter(None, map(self.code_of, parts)), "")
            self.seen += parts
            self.told.append(item)
            self.next_no += 1
        end = frame.first_no + len(frame.items)
        codes = [self._codes[at] for at in range(frame.first_no, end)]
        return msg.Seen(number, boot, self.next_no, codes if any(codes) else [])

    def _parts(self, item: items.SlotItem) -> list[items.SlotItem]:
        """What an item says, event by event; copies of a step are named."""
        if isinstance(item, items.StepOpenedItem):
            self._steps[item.step] = item
        if not isinstance(item, items.UsedItem):
            return [item]
        slot, epoch, layer = item.slot, item.epoch, item.layer
        loads = self._steps[item.loads].loads if item.loads else []
        saves = self._steps[item.saves].saves if item.saves else []
        parts: dict[int, items.SlotItem] = {
            items.ACQUIRED: items.AcquiredItem(slot, epoch, layer, loads),
            items.LOADED: items.LoadEndedItem(slot, epoch, True),
            items.WRITTEN: items.WrittenItem(slot, epoch, layer, saves),
            items.COMPUTED: items.ComputedItem(slot, epoch),
            items.SAVED: items.SaveEndedItem(slot, epoch, item.saver, True),
        }
        return [part for did, part in parts.items() if item.did & did]

    def _send(self, frame: msg.ServerFrame | bytes) -> None:
        data = frame if isinstance(frame, bytes) else server_codec().encode(frame)
        self._router.send_multipart([self._peer, data])
