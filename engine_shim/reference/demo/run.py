"""The demo's acts, and what they found.

1. a long text: prefilled on a few layer buffers, handed over layer by layer, decoded with hot
   buffers in another process
2. a second text with the same beginning: its prefix is found in the pool
3. the prefill engine is killed and started again: what it stored is still there
4. the same texts on the resident model: tokens and every bit of the logits must be equal
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from engine_shim.reference import orders as od
from engine_shim.reference.config import ModelConfig
from engine_shim.reference.demo.interrupts import Interrupts
from engine_shim.reference.demo.processes import EngineProcess, OwnDaemon
from engine_shim.reference.demo.resident import ResidentRun, run_resident
from engine_shim.reference.demo.sampler import Sampler
from engine_shim.reference.demo.show import Show, size
from engine_shim.reference.native_reads import can_read_natively
from engine_shim.reference.serve import model_config

MIB: Final = 1 << 20
ORDER_SECONDS: Final = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the demo runs; see `__main__.py` for its command line."""

    tokens: tuple[int, ...]
    num_new: int = 64
    model: str = "demo"
    seed: int = 0
    chunk: int = 2048
    block_tokens: int = 128
    buffers: int = 3
    width: int = 4
    threads: int = 1

    @property
    def max_tokens(self) -> int:
        """Longest sequence, in whole blocks."""
        longest = len(self.tokens) + self.num_new
        return -(-longest // self.block_tokens) * self.block_tokens


class DemoFailed(RuntimeError):
    """An engine refused or ended; the text says which and why."""


def hit_rate(figures: Mapping[str, float]) -> float:
    """Share of selected rows that were in the hot buffer."""
    used = figures["hot_hits"] + figures["hot_misses"] + figures["hot_scratch"]
    return figures["hot_hits"] / used if used else 0.0


@dataclass(slots=True)
class Request:
    """One request's way through both engines."""

    name: str
    prefilled: od.Prefilled
    decoded: od.Decoded

    @property
    def hot_hit_rate(self) -> float:
        """Share of the distinct rows of its steps' selections that were in the hot buffer."""
        return hit_rate(self.decoded.figures)


@dataclass(slots=True)
class DemoResult:
    """Everything that the demo found."""

    requests: list[Request] = field(default_factory=list)
    resident: list[ResidentRun] = field(default_factory=list)
    prefill: dict[str, float] = field(default_factory=dict)
    decode: dict[str, float] = field(default_factory=dict)
    prefill_ready: od.Ready | None = None
    decode_ready: od.Ready | None = None
    status: list[dict[str, object]] = field(default_factory=list)
    samples: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tokens_equal(self) -> bool:
        """Whether every request gave the resident run's tokens."""
        return bool(self.resident) and all(
            request.decoded.tokens == resident.tokens
            for request, resident in zip(self.requests, self.resident, strict=True)
        )

    @property
    def logits_equal(self) -> list[bool]:
        """For each request whether every bit of its logits is the resident run's."""
        return [
            request.decoded.logits_digest == resident.logits_digest
            for request, resident in zip(self.requests, self.resident, strict=True)
        ]


class Demo:
    """Runs the acts; processes end with it."""

    def __init__(self, options: DemoOptions, show: Show, interrupts: Interrupts) -> None:
        self._options = options
        self._show = show
        self._interrupts = interrupts
        self._result = DemoResult()
        self._undo = ExitStack()
        config = model_config(options.model, options.seed, options.max_tokens)
        self._config: ModelConfig = config
        self._native = can_read_natively(config, options.width)

    def run(self) -> DemoResult:
        """Everything, in order.

        Raises: DemoFailed; RuntimeError, TimeoutError when a process ends or says nothing;
            KeyboardInterrupt. No process is left then.
        """
        started = time.monotonic()
        first, second = self._texts()
        try:
            self._start()
            self._request("first", first, "the whole text")
            self._request("second", second, "the same beginning, another end")
            self._figures()
            self._kill_prefill()
            self._request("third", first, "the first text again, after kill -9")
            self._last_look()
        finally:
            with self._interrupts.held():
                self._undo.close()
        self._resident((first, second))
        self._result.seconds = time.monotonic() - started
        return self._result

    # Acts -------------------------------------------------------------------------------------

    def _texts(self) -> tuple[list[int], list[int]]:
        tokens = list(self._options.tokens)
        keep = len(tokens) * 3 // 4
        return tokens, tokens[:keep] + tokens[: len(tokens) - keep]

    def _start(self) -> None:
        options, config = self._options, self._config
        per_token = config.token_bytes
        pool = -(-3 * per_token * options.max_tokens // (64 * MIB)) * 64
        region = -(-2 * per_token * options.max_tokens // (64 * MIB)) * 64 + 64
        lasting = ("peers.transfer_deadline=15min", "readiness.oldest_wait_max=10min")
        self._show.step(f"two kvds: P with a pool of {pool} MiB, D with a decode region")
        self._prefill_kvd = self._daemon(f"pool.size={pool}MiB", *lasting)
        self._decode_kvd = self._daemon(
            "pool.size=64KiB", f"regions.size_max={region}MiB", *lasting
        )
        self._samplers = [
            self._sampler(name, kvd)
            for name, kvd in (("P", self._prefill_kvd), ("D", self._decode_kvd))
        ]
        self._show.step("a prefill and a decode engine, each a process of its own")
        self._prefill = self._start_prefill()
        port = free_port()
        reads = "native" if self._native else "torch"
        decode = ("--kv-port", str(port), "--max-width", str(options.width), "--reads", reads)
        self._decode = self._engine("decode", self._decode_kvd, *decode)
        self._result.prefill_ready = self._prefill.wait_ready()
        self._result.decode_ready = self._decode.wait_ready()
        buffers = size(self._result.prefill_ready.device_bytes)
        resident = size(self._result.prefill_ready.resident_bytes)
        self._show.fact(
            f"{config.num_layers} layers on 1 + {options.buffers} buffers and a spare: {buffers} "
            f"(one buffer for each layer: {resident})"
        )

    def _daemon(self, *settings: str) -> OwnDaemon:
        with self._interrupts.held():
            kvd = OwnDaemon(*settings)
            self._undo.callback(kvd.close)
            kvd.start(wait=False)
        kvd.wait_ready()
        return kvd

    def _sampler(self, name: str, kvd: OwnDaemon) -> Sampler:
        with self._interrupts.held():
            sampler = Sampler(name, kvd.runtime_dir)
            self._undo.callback(sampler.close)
        return sampler

    def _start_prefill(self) -> EngineProcess:
        return self._engine("prefill", self._prefill_kvd, "--buffers", str(self._options.buffers))

    def _engine(self, role: str, kvd: OwnDaemon, *args: str) -> EngineProcess:
        options = self._options
        with self._interrupts.held():
            engine = EngineProcess(
                role,
                role,
                "--runtime-dir",
                str(kvd.runtime_dir),
                "--model",
                options.model,
                "--seed",
                str(options.seed),
                "--max-tokens",
                str(options.max_tokens),
                "--block-tokens",
                str(options.block_tokens),
                "--chunk",
                str(options.chunk),
                "--threads",
                str(options.threads),
                *args,
            )
            self._undo.callback(engine.close)
        return engine

    def _request(self, name: str, tokens: Sequence[int], what: str) -> None:
        """One request: expect at D, prefill at P, decode at D."""
        options = self._options
        self._show.step(f"{name} request: {len(tokens)} tokens, {what}")
        expecting = self._decode.ask(od.Expect(name, len(tokens), options.num_new), ORDER_SECONDS)
        if not isinstance(expecting, od.Expecting):
            raise _failed("decode", expecting)
        order = od.Prefill(name, list(tokens), [expecting.target])
        with self._show.progress("prefill", len(tokens)) as follow:
            prefilled = self._prefill.ask(order, ORDER_SECONDS, follow)
        if not isinstance(prefilled, od.Prefilled):
            raise _failed("prefill", prefilled)
        self._show.fact(
            f"prefilled in {prefilled.seconds:.1f} s, {prefilled.hit_tokens} tokens found in the "
            "pool"
        )
        decoded = self._decode.ask(
            od.Decode(name, list(tokens), options.num_new, options.width), ORDER_SECONDS
        )
        if not isinstance(decoded, od.Decoded):
            raise _failed("decode", decoded)
        self._show.fact(
            f"decoded {len(decoded.tokens)} tokens in {decoded.num_steps} steps and "
            f"{decoded.seconds:.1f} s; its rows were waited for {1e3 * decoded.waited_s:.0f} ms"
        )
        request = Request(name, prefilled, decoded)
        figures = decoded.figures
        self._show.fact(
            f"{100 * request.hot_hit_rate:.1f} % of its rows were hits, "
            f"{figures['hot_merged_misses']:.0f} misses merged, "
            f"{100 * figures['hot_overlap']:.0f} % of the loads hidden"
        )
        self._result.requests.append(request)

    def _figures(self) -> None:
        """The engines' own figures, before one of them is killed."""
        for engine, into in (
            (self._prefill, self._result.prefill),
            (self._decode, self._result.decode),
        ):
            news = engine.ask(od.Report(), ORDER_SECONDS)
            if not isinstance(news, od.Figures):
                raise _failed(engine.name, news)
            into.update(news.values)

    def _kill_prefill(self) -> None:
        self._show.step("kill -9 of the prefill engine; a new one attaches to the same kvd")
        with self._interrupts.held():
            os.kill(self._prefill.process.pid, signal.SIGKILL)
            self._prefill.close()
        self._prefill = self._start_prefill()
        self._prefill.wait_ready()

    def _last_look(self) -> None:
        """The status of both kvds at the end, and what the samples said."""
        for kvd in (self._prefill_kvd, self._decode_kvd):
            code, document = kvd.get("/v1/status")
            if code != 200:
                raise DemoFailed(f"status answered {code}: {document}")
            self._result.status.append(document)
        for sampler in self._samplers:
            self._result.samples += sampler.samples
            self._result.problems += sampler.problems

    def _resident(self, texts: Sequence[Sequence[int]]) -> None:
        """The same on the resident model; the third request has the first one's text."""
        options = self._options
        from engine_shim.reference.threads import configure_threads

        configure_threads(options.threads)
        runs: list[ResidentRun] = []
        for name, tokens in zip(("first", "second"), texts, strict=True):
            self._show.step(f"the {name} text on the resident model")
            with self._show.progress("resident", len(tokens)) as follow:
                run = run_resident(
                    self._config,
                    tokens,
                    options.num_new,
                    options.chunk,
                    lambda done, total: follow(od.Progress("resident", done, total)),
                    native=self._native,
                )
            runs.append(run)
        self._result.resident = [runs[0], runs[1], runs[0]]


def _failed(engine: str, news: od.News) -> DemoFailed:
    if isinstance(news, od.Failed):
        return DemoFailed(f"{engine} engine: {news.code}: {news.detail}")
    return DemoFailed(f"{engine} engine said {type(news).__name__}")


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
