"""Two kvds and two tiny engines, and what the resident model says to the same text."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from engine_shim.reference import orders as od
from engine_shim.reference.bytes_tokenizer import encode, long_text
from engine_shim.reference.demo.processes import EngineProcess, OwnDaemon, pause
from engine_shim.reference.demo.run import free_port
from engine_shim.reference.serve import model_config
from engine_shim.steps import Target

if TYPE_CHECKING:
    from engine_shim.reference.model import SparseModel

TOKENS = 900
NEW = 24
CHUNK = 256
BLOCK = 64
MAX_TOKENS = 1088
SIZES = (
    "--model", "tiny", "--max-tokens", str(MAX_TOKENS), "--block-tokens", str(BLOCK),
    "--chunk", str(CHUNK),
)  # fmt: skip
QUICK = (
    "release.offer_deadline=3s",
    "release.read_deadline=1s",
    "release.query_interval=100ms",
    "peers.transfer_deadline=30s",
)
ORDER_SECONDS = 60.0


@functools.cache
def text(num_tokens: int = TOKENS, skip: int = 0) -> tuple[int, ...]:
    """Token ids of a real text."""
    return tuple(encode(long_text(num_tokens + skip))[skip : skip + num_tokens])


@functools.cache
def the_model() -> SparseModel:
    """The model of both engines."""
    from engine_shim.reference.model import SparseModel
    from engine_shim.reference.threads import configure_threads

    # More threads than free cores wait for one another.
    configure_threads(1)
    return SparseModel(model_config("tiny", 0, MAX_TOKENS))


@functools.cache
def resident(tokens: tuple[int, ...], num_new: int = NEW) -> tuple[list[int], str]:
    """What the resident model generates after `tokens`, and the digest of its logits."""
    from engine_shim.reference.cache import ResidentCache
    from engine_shim.reference.generate import decode, prefill
    from engine_shim.reference.native_reads import NativeResidentCache

    model = the_model()
    cache = ResidentCache(model.config, MAX_TOKENS)
    prefill(model, cache, tokens, CHUNK)
    decoded = decode(model, NativeResidentCache(cache), tokens, num_new)
    return decoded.tokens, decoded.logits_digest


class Pair:
    """P and D, each a kvd with an engine; ends everything that it started."""

    def __init__(self, *, tp_prefill: int = 1, tp_decode: int = 1, buffers: int = 2) -> None:
        self._stack = ExitStack()
        self._tp = {"prefill": tp_prefill, "decode": tp_decode}
        self.buffers = buffers
        self.port = free_port()
        self.prefill_kvd = OwnDaemon("pool.size=64MiB", *QUICK)
        self.decode_kvd = OwnDaemon("pool.size=1MiB", "regions.size_max=256MiB", *QUICK)
        with ExitStack() as undo:
            undo.callback(self.close)
            for kvd in (self.prefill_kvd, self.decode_kvd):
                self._stack.callback(kvd.close)
                kvd.start()
            self.prefill = self.start_prefill()
            self.decode = self.start_decode()
            undo.pop_all()

    def start_prefill(self, *args: str, prefix: Sequence[str] = ()) -> EngineProcess:
        """Start a prefill engine; replaces `self.prefill`."""
        self.prefill = self._engine(
            "prefill", self.prefill_kvd, "--buffers", str(self.buffers), *args, prefix=prefix
        )
        return self.prefill

    def start_decode(self, *args: str, prefix: Sequence[str] = ()) -> EngineProcess:
        """Start a decode engine; replaces `self.decode`."""
        self.decode = self._engine(
            "decode", self.decode_kvd, "--kv-port", str(self.port), *args, prefix=prefix
        )
        return self.decode

    def _engine(
        self, role: str, kvd: OwnDaemon, *args: str, prefix: Sequence[str] = ()
    ) -> EngineProcess:
        engine = EngineProcess(
            role, role, "--runtime-dir", str(kvd.runtime_dir), *SIZES, *args,
            tp_size=self._tp[role], prefix=prefix,
        )  # fmt: skip
        self._stack.callback(engine.close)
        engine.wait_ready()
        return engine

    def expect(self, request: str, tokens: Sequence[int], num_new: int = NEW) -> Target:
        """Make room at D."""
        news = self.decode.ask(od.Expect(request, len(tokens), num_new), ORDER_SECONDS)
        assert isinstance(news, od.Expecting), news
        return news.target

    def run(
        self,
        request: str,
        tokens: tuple[int, ...],
        *,
        num_new: int = NEW,
        width: int = 1,
        overlapped: bool = False,
    ) -> tuple[od.Prefilled, od.Decoded]:
        """One request through both engines."""
        target = self.expect(request, tokens, num_new)
        prefilled = self.prefill.ask(od.Prefill(request, list(tokens), [target]), ORDER_SECONDS)
        assert isinstance(prefilled, od.Prefilled), prefilled
        assert prefilled.transfers == [""]
        order = od.Decode(request, list(tokens), num_new, width, overlapped=overlapped)
        decoded = self.decode.ask(order, ORDER_SECONDS)
        assert isinstance(decoded, od.Decoded), decoded
        return prefilled, decoded

    def check(self, request: str, tokens: tuple[int, ...], *, width: int = 1) -> od.Prefilled:
        """One request whose tokens and logits are the resident run's; returns its prefill."""
        prefilled, decoded = self.run(request, tokens, width=width)
        assert (decoded.tokens, decoded.logits_digest) == resident(tokens)
        return prefilled

    def settled(self) -> None:
        """Nothing is held, pinned for nobody, or half done at either kvd."""
        for kvd in (self.prefill_kvd, self.decode_kvd):
            until(functools.partial(_is_settled, kvd), functools.partial(kvd.get, "/v1/status"))

    def close(self) -> None:
        """End everything."""
        self._stack.close()


def _is_settled(kvd: OwnDaemon) -> bool:
    _, status = kvd.get("/v1/status")
    slots, blocks, open_ = status["slots"], status["pool"]["blocks"], status["transfers"]
    return bool(
        status["invariants"]["ok"]
        and slots["held"] == 0
        and blocks["filling"] == 0
        and blocks["poisoned"] == 0
        and status["pool"]["pinned_blocks"] == 0
        and open_["reads_open"] == 0
        and open_["copies_running"] == 0
        and open_["outgoing_open"] == 0
        and open_["incoming_open"] == 0
    )


def until(
    condition: Callable[[], bool], explain: Callable[[], object], seconds: float = 20.0
) -> None:
    """Wait for something that other processes bring about; fails with an explanation."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, explain()
        pause(0.01)


@contextmanager
def a_pair(**options: int) -> Iterator[Pair]:
    """A pair that is closed at the end."""
    pair = Pair(**options)
    try:
        yield pair
    finally:
        pair.close()
