"""Encoders and decoders for every socket; limits are checked before anything is parsed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Generic, TypeVar

import msgspec

from kvd.wire import attach, messages, peer_messages
from kvd.wire.protocol import ATTACH_BYTES_MAX, FRAME_BYTES_MAX

T = TypeVar("T")

_HEAD_BYTES: Final = 5 + 2 + 255 + 9
"""Longest array head, operation and request number."""

_ARRAY_HEADS: Final[Mapping[int, int]] = MappingProxyType(
    dict.fromkeys(range(0x90, 0xA0), 1) | {0xDC: 3, 0xDD: 5}
)
"""First byte of an array -> bytes of its head."""

_UINT_BYTES: Final[Mapping[int, int]] = MappingProxyType({0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8})
"""First byte of an unsigned number -> bytes that follow."""

_STR8: Final = 0xD9


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
            sizes = _sizes(len(data), self._limit)
            raise FrameError("frame_too_large", sizes, request_no_of(data))
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _explain(data, error) from None


def _sizes(size: int, limit: int) -> dict[str, str]:
    return {"size": str(size), "limit": str(limit)}


def _explain(data: bytes | memoryview, error: Exception) -> FrameError:
    """What is wrong with a frame, and whose request it was if that much can be read."""
    op, number = _head_of(data)
    if op and "Invalid value" in str(error) and str(error).endswith("`$[0]`"):
        return FrameError("op_unknown", {"op": op[:64]}, number)
    return FrameError("frame_malformed", {"detail": str(error)[:200]}, number)


def request_no_of(data: bytes | memoryview) -> int:
    """The request number of a frame whose rest cannot be read; 0 if not even that can be."""
    return _head_of(data)[1]


def _head_of(data: bytes | memoryview) -> tuple[str, int]:
    """Operation and request number from the first bytes alone, whatever follows them.

    The decoder cannot stop early: it would stumble over what is wrong further on.
    """
    head = bytes(data[:_HEAD_BYTES])
    try:
        at = _ARRAY_HEADS[head[0]]
        op, at = _short_text(head, at)
        return op, _unsigned(head, at)
    except (LookupError, ValueError):
        return "", 0


def _short_text(head: bytes, at: int) -> tuple[str, int]:
    """A text of at most 255 bytes, and where it ends."""
    start = at + 1
    if head[at] == _STR8:
        size, start = head[at + 1], at + 2
    else:
        size = _carried(head[at], 0xA0, 32)
    return head[start : start + size].decode(), start + size


def _unsigned(head: bytes, at: int) -> int:
    size = _UINT_BYTES.get(head[at], 0)
    if not size:
        return _carried(head[at], 0, 128)
    digits = head[at + 1 : at + 1 + size]
    if len(digits) < size:
        raise ValueError("cut off")
    return int.from_bytes(digits, "big")


def _carried(byte: int, base: int, count: int) -> int:
    """The number that a byte carries itself.

    Raises: ValueError for a byte of another kind.
    """
    if not base <= byte < base + count:
        raise ValueError(byte)
    return byte - base


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
