"""Encoders and decoders for every socket; limits are checked before anything is parsed."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from kvd.wire import attach, messages, peer_messages
from kvd.wire.protocol import ATTACH_BYTES_MAX, FRAME_BYTES_MAX

T = TypeVar("T")


class FrameError(ValueError):
    """A frame that is not one. `code` is of the error catalogue, `request_no` 0 if unreadable."""

    def __init__(self, code: str, context: dict[str, str], request_no: int = 0) -> None:
        super().__init__(code, context)
        self.code = code
        self.context = context
        self.request_no = request_no


class Codec(Generic[T]):
    """One direction of one socket."""

    def __init__(self, kind: object, limit: int) -> None:
        """kind: the union of message types; limit: bytes of the largest message."""
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self._limit = limit

    @property
    def limit(self) -> int:
        """Bytes of the largest message."""
        return self._limit

    def encode(self, message: T) -> bytes:
        """One message.

        Raises: FrameError(frame_too_large).
        """
        data = self._encoder.encode(message)
        if len(data) > self._limit:
            raise FrameError("frame_too_large", _sizes(len(data), self._limit))
        return data

    def decode(self, data: bytes | memoryview) -> T:
        """One message.

        Raises: FrameError(frame_too_large | op_unknown | frame_malformed).
        """
        if len(data) > self._limit:
            raise FrameError("frame_too_large", _sizes(len(data), self._limit))
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _explain(data, error) from None


def _sizes(size: int, limit: int) -> dict[str, str]:
    return {"size": str(size), "limit": str(limit)}


class _Head(msgspec.Struct, array_like=True, frozen=True, gc=False):
    op: str
    request_no: int = 0


_HEAD = msgspec.msgpack.Decoder(_Head)


def _explain(data: bytes | memoryview, error: Exception) -> FrameError:
    """What is wrong with a frame, and whose request it was if that much can be read."""
    op, number = "", 0
    try:
        head = _HEAD.decode(data)
        op, number = head.op, max(0, head.request_no)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    if op and "Invalid value" in str(error) and str(error).endswith("`$[0]`"):
        return FrameError("op_unknown", {"op": op[:64]}, number)
    return FrameError("frame_malformed", {"detail": str(error)[:200]}, number)


def client_codec(limit: int = FRAME_BYTES_MAX) -> Codec[messages.ClientFrame]:
    """Member to kvd."""
    return Codec(messages.ClientFrame, limit)


def server_codec(limit: int = FRAME_BYTES_MAX) -> Codec[messages.ServerFrame]:
    """kvd to member."""
    return Codec(messages.ServerFrame, limit)


def consumer_codec(limit: int = FRAME_BYTES_MAX) -> Codec[peer_messages.ToConsumer]:
    """Producer's kvd to consumer's kvd."""
    return Codec(peer_messages.ToConsumer, limit)


def producer_codec(limit: int = FRAME_BYTES_MAX) -> Codec[peer_messages.ToProducer]:
    """Consumer's kvd to producer's kvd."""
    return Codec(peer_messages.ToProducer, limit)


def attach_request_codec() -> Codec[attach.AttachRequest]:
    """Client to attach.sock."""
    return Codec(attach.AttachRequest, ATTACH_BYTES_MAX)


def attach_reply_codec() -> Codec[attach.AttachReply]:
    """attach.sock to client."""
    return Codec(attach.AttachReply, ATTACH_BYTES_MAX)
