"""Memory of decode regions, asked for on the attach connection: one at a time, in order."""

from __future__ import annotations

import socket

from engine_shim.client.attaching import (
    FileId,
    close_all,
    decode_reply,
    file_of,
    map_memory,
    receive,
)
from engine_shim.client.errors import KvdRefused
from engine_shim.client.session import SUMS_REGION, Core, MapCall, SessionLost
from kvd.wire.attach import Mapped, MapRegion, MapSums
from kvd.wire.codec import attach_request_codec
from kvd_kernels.host import Mapping


class RegionCalls:
    """The attach connection after the attach; belongs to the client's thread."""

    def __init__(self, core: Core, sock: socket.socket) -> None:
        self._core = core
        self._sock = sock
        self._encode = attach_request_codec().encode
        self._asked: MapCall | None = None

    def ask(self) -> None:
        """Send the next question, unless one waits for its answer.

        Raises: SessionLost.
        """
        core = self._core
        with core.lock:
            if self._asked is not None or not core.map_calls:
                return
            call = self._asked = core.map_calls.popleft()
        try:
            wanted = MapSums() if call.region == SUMS_REGION else MapRegion(call.region)
            self._sock.send(self._encode(wanted))
        except OSError as error:
            raise SessionLost(core.gone(error.strerror or str(error))) from error

    def read(self) -> None:
        """Take the answer that has come, or notice the end of the connection.

        Raises: SessionLost.
        """
        core = self._core
        try:
            data, fds = receive(self._sock)
        except BlockingIOError:
            return
        except KvdRefused as failure:
            raise SessionLost(failure) from failure
        try:
            if not data:
                raise SessionLost(core.gone("it ended the connection"))
            call, self._asked = self._asked, None
            if call is None:
                detail = "attach.sock said something that was not asked for"
                raise SessionLost(KvdRefused("frame_malformed", detail=detail))
            self._settle(call, data, fds)
        finally:
            close_all(fds)

    def _settle(self, call: MapCall, data: bytes, fds: list[int]) -> None:
        core = self._core
        try:
            mapping, file = _map(data, fds, call.region)
        except KvdRefused as refusal:
            with core.lock:
                core.requests.refuse(call.number, refusal)
                core.room.notify_all()
            return
        with core.lock:
            # Kept even when the caller has gone: whoever asks next finds it. What is mapped
            # already stays, unless a later kvd has other memory of that name.
            spare = core.regions.get(call.region)
            if spare is not None and core.region_files[call.region] == file:
                spare = mapping
            else:
                core.regions[call.region] = mapping
                core.region_files[call.region] = file
        if spare is mapping:
            mapping.close()  # nobody has seen it
        elif spare is not None:
            core.retired.add([spare])
        with core.lock:
            core.requests.answer(call.number, None)
            core.room.notify_all()


def _map(data: bytes, fds: list[int], region: str) -> tuple[Mapping, FileId]:
    reply = decode_reply(data)
    if not isinstance(reply, Mapped) or len(fds) != 1:
        raise KvdRefused("frame_malformed", detail="this is not the memory of a region")
    try:
        if region == SUMS_REGION:
            return Mapping(fds[0], reply.num_bytes, writable=False), file_of(fds[0])
        return map_memory(fds[0], reply.num_bytes), file_of(fds[0])
    except (ValueError, OSError) as error:
        raise KvdRefused("frame_malformed", detail=f"memory of a region: {error}") from error
