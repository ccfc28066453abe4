"""What an engine process is told and what it says: one JSON document a line.

Orders come on standard input, news go to standard output; logs go to standard error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from engine_shim.steps import Target

LINE_BYTES_MAX: Final = 64 << 20


class Prefill(msgspec.Struct, frozen=True, tag="prefill", tag_field="op"):
    """Compute a prompt, store it, offer it to the targets."""

    request: str
    tokens: list[int]
    targets: list[Target] = []


class Expect(msgspec.Struct, frozen=True, tag="expect", tag_field="op"):
    """Make room for a prompt of so many tokens, to be decoded `num_new` tokens further."""

    request: str
    num_tokens: int
    num_new: int


class Decode(msgspec.Struct, frozen=True, tag="decode", tag_field="op"):
    """Wait for the prompt's rows and generate `num_new` tokens after it.

    width: positions in one step; more than 1 drafts.
    overlapped: attend to rows that are there while others are copied; see `HotStore.open`.
    """

    request: str
    tokens: list[int]
    num_new: int
    width: int = 1
    deadline_s: float = 120.0
    overlapped: bool = False


class Drop(msgspec.Struct, frozen=True, tag="drop", tag_field="op"):
    """Give a request up."""

    request: str


class Report(msgspec.Struct, frozen=True, tag="report", tag_field="op"):
    """Say the engine's figures."""


class Stop(msgspec.Struct, frozen=True, tag="stop", tag_field="op"):
    """End."""


Order = Prefill | Expect | Decode | Drop | Report | Stop


class Ready(msgspec.Struct, frozen=True, tag="ready", tag_field="news"):
    """The engine is attached and can take orders.

    device_bytes:   of its layer buffers or hot buffers and resident parts.
    resident_bytes: what one buffer for each layer would take.
    """

    pid: int
    device_bytes: int
    resident_bytes: int
    detail: str = ""


class Progress(msgspec.Struct, frozen=True, tag="progress", tag_field="news"):
    """So many of the request's tokens are done."""

    request: str
    done: int
    total: int


class Prefilled(msgspec.Struct, frozen=True, tag="prefilled", tag_field="news"):
    """A prompt is computed and stored.

    transfers: for each target why its rows did not arrive, '' where they did.
    """

    request: str
    num_tokens: int
    hit_tokens: int
    num_steps: int
    seconds: float
    first_token: int
    transfers: list[str] = []


class Expecting(msgspec.Struct, frozen=True, tag="expecting", tag_field="news"):
    """The destination of a prompt is ready: what the prefill engine must be given."""

    request: str
    target: Target


class Decoded(msgspec.Struct, frozen=True, tag="decoded", tag_field="news"):
    """Tokens were generated.

    waited_s:      for the rows of the prompt, after the order came.
    logits_digest: see `engine_shim.reference.generate.Decoded`.
    figures:       what hot buffers did for this request; see `HotFigures.named`.
    """

    request: str
    tokens: list[int]
    num_steps: int
    num_accepted: int
    num_rejected: int
    logits_digest: str
    waited_s: float
    seconds: float
    figures: dict[str, float] = {}


class Figures(msgspec.Struct, frozen=True, tag="figures", tag_field="news"):
    """Named figures of the engine."""

    values: dict[str, float]


class Failed(msgspec.Struct, frozen=True, tag="failed", tag_field="news"):
    """An order could not be done; the engine goes on."""

    request: str
    code: str
    detail: str


News = Ready | Progress | Prefilled | Expecting | Decoded | Figures | Failed

Say = Callable[[News], None]
"""Tells news."""


class Lines:
    """Encodes and decodes lines of both directions."""

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()
        self._orders = msgspec.json.Decoder(Order)
        self._news = msgspec.json.Decoder(News)

    def write(self, message: Order | News) -> bytes:
        """One line."""
        return self._encoder.encode(message) + b"\n"

    def order(self, line: bytes) -> Order:
        """Read an order.

        Raises: msgspec.DecodeError for a line that is none.
        """
        order: Order = self._orders.decode(line)
        return order

    def news(self, line: bytes) -> News:
        """Read news.

        Raises: msgspec.DecodeError for a line that is none.
        """
        news: News = self._news.decode(line)
        return news
