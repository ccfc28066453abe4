"""Orders from rank 0 to the other ranks of an engine, over UNIX sockets.

The ranks' tensors meet in a `Collective`; what to run next comes this way. The end of the
connection is the end of the engine: a rank never waits for a rank 0 that is gone.
"""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from engine_shim.steps import StepRequest

MESSAGE_BYTES_MAX: Final = 160 << 10
CONNECT_SECONDS: Final = 60.0
RETRY_SECONDS: Final = 0.02


class StepOrder(msgspec.Struct, frozen=True, array_like=True):
    """One thing for all ranks to do.

    kind:   `run` a prefill step, `forget` a request, `decode` one, `stop`.
    tokens: the step's token ids, of a decode the whole prompt; then request.end is the number of
            new tokens.
    width:  positions in one decode step.
    last:   wait until everything is saved.
    rebind: slot whose layers move to a spare before the step, -1 for none.
    overlapped: form of a decode's attention; see `HotStore.open`.
    """

    kind: str
    request: StepRequest
    tokens: list[int] = []
    last: bool = False
    rebind: int = -1
    width: int = 1
    overlapped: bool = False

    @classmethod
    def run(cls, request: StepRequest, tokens: list[int], last: bool) -> StepOrder:
        """Run one step."""
        return cls("run", request, tokens, last)

    @classmethod
    def forget(cls, request: str) -> StepOrder:
        """The request has ended."""
        return cls("forget", StepRequest(request, (), (), 0, 0))

    def after_rebind(self, slot: int) -> StepOrder:
        """The same step after the slot's layers have moved."""
        return StepOrder("run", replace(self.request), self.tokens, self.last, slot)


class RankGroup:
    """One rank's end; made by `lead`, `join` or `alone`."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._sockets = sockets
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepOrder)

    @classmethod
    def alone(cls) -> RankGroup:
        """An engine of one rank."""
        return cls([])

    @classmethod
    def lead(cls, path: Path, size: int) -> RankGroup:
        """Be rank 0 of `size` ranks: wait for the others.

        Raises: TimeoutError when they do not come.
        """
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as door:
            door.bind(str(path))
            door.listen(size)
            door.settimeout(CONNECT_SECONDS)
            sockets = [door.accept()[0] for _ in range(size - 1)]
        path.unlink(missing_ok=True)
        return cls(sockets)

    @classmethod
    def join(cls, path: Path) -> RankGroup:
        """Be another rank: connect to rank 0, once it listens.

        Raises: OSError when it does not in time.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        end = time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                connection.connect(str(path))
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > end:
                    connection.close()
                    raise
                time.sleep(RETRY_SECONDS)
            else:
                return cls([connection])

    def send(self, order: StepOrder) -> None:
        """Rank 0: let all others do it. A rank that is gone is noticed by the collective."""
        data = self._encoder.encode(order)
        for connection in self._sockets:
            try:
                connection.send(data)
            except (BrokenPipeError, ConnectionResetError):
                continue

    def receive(self) -> StepOrder | None:
        """Another rank: the next order; None when the engine stops or rank 0 is gone."""
        try:
            data = self._sockets[0].recv(MESSAGE_BYTES_MAX)
        except ConnectionResetError:
            return None
        if not data:
            return None
        order = self._decoder.decode(data)
        return None if order.kind == "stop" else order

    def stop(self) -> None:
        """Rank 0: end the engine."""
        self.send(StepOrder("stop", StepRequest("", (), (), 0, 0)))
        for connection in self._sockets:
            connection.close()
        self._sockets = []
