"""A server that answers every frame and does nothing: the baseline of the control plane.

The same stack as kvd: ROUTER on a UNIX path, uvloop, the descriptor drained, frames decoded and a
reply encoded by the same codecs. `python -m bench.echo PATH`.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final

import uvloop
import zmq

from kvd.server.loop_meter import LoopMeter
from kvd.server.zmq_pump import ZmqPump
from kvd.wire import messages
from kvd.wire.codec import client_codec, server_codec
from kvd.wire.protocol import BOOT_ID_BYTES

BOOT_ID: Final = bytes(BOOT_ID_BYTES)


async def serve(path: str) -> None:
    """Echo until killed."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{path}")
    decode, encode = client_codec().decode, server_codec().encode

    def echo(parts: list[bytes]) -> None:
        frame = decode(parts[1])
        pump.send([parts[0], encode(messages.Done(frame.request_no, BOOT_ID))])

    pump = ZmqPump(router, echo, LoopMeter())
    pump.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.argv[1]))
