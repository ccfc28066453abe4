"""The demo's acts, and what they found.

1. a vLLM server computes a long text on a few layer buffers; its blocks go to kvd's pool
2. all of that server is killed (-9)
3. another server, another process, is asked the same: the text is found in the pool
4. stock vLLM, without kvd and with memory for every layer, is asked the same: the tokens must be
   equal in all three
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from engine_shim.reference.demo.interrupts import Interrupts
from engine_shim.reference.demo.processes import OwnDaemon, clean_environment
from engine_shim.reference.demo.run import free_port
from engine_shim.reference.demo.show import Show, size
from engine_shim.vllm.demo.model import TOKEN_BYTES
from engine_shim.vllm.demo.server import Completion, VllmServer, arguments, write_model

MIB: Final = 1 << 20
BLOCK_TOKENS: Final = 128
CHUNK: Final = 1024
STOCK_SHARE: Final = 0.6
"""Of the text's KV that the device has room for: without sharing buffers the text does not fit."""
KVCTL_SECONDS: Final = 30.0
WARM_UP: Final = "The first request of a process pays for what is made once. "


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the demo runs; see `options.py` for its command line."""

    text: str
    num_new: int
    buffers: int
    seed: int
    threads: int
    kills: bool
    python: str

    @property
    def num_blocks(self) -> int:
        """Blocks of the text and of what is generated."""
        return -(-(len(self.text) + self.num_new) // BLOCK_TOKENS)

    @property
    def device_bytes(self) -> int:
        """Memory for KV of the servers with kvd."""
        return int(STOCK_SHARE * self.num_blocks) * BLOCK_TOKENS * TOKEN_BYTES

    @property
    def stock_bytes(self) -> int:
        """The same of the stock server: the text fits."""
        return (self.num_blocks + 4) * BLOCK_TOKENS * TOKEN_BYTES

    @property
    def pool_mib(self) -> int:
        """MiB of kvd's pool: twice the text."""
        return 2 * self.stock_bytes // MIB + 16


class DemoFailed(RuntimeError):
    """The demo cannot show what it is to show; the text says why."""


@dataclass(slots=True)
class DemoResult:
    """Everything that the demo found.

    cold, hit, stock: of the first server, of the second one, of stock vLLM.
    start_s: seconds until each served.
    engine:  what kvd says of the first engine.
    pool:    kvd's pool after the first server's end, and at the end.
    """

    cold: Completion | None = None
    hit: Completion | None = None
    stock: Completion | None = None
    start_s: dict[str, float] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    merge_line: str = ""
    pool: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tokens_equal(self) -> bool:
        """Whether all three servers gave the same tokens."""
        answers = [done.tokens for done in (self.cold, self.hit, self.stock) if done is not None]
        return len(answers) == 3 and answers[0] == answers[1] == answers[2]

    @property
    def is_good(self) -> bool:
        """Whether the second server also found the text, and the others computed it."""
        found = [done.num_cached for done in (self.cold, self.hit, self.stock) if done is not None]
        return self.tokens_equal and found[1] > 0 and found[0] == found[2] == 0


class Demo:
    """Runs the acts; processes end with it."""

    def __init__(self, options: DemoOptions, show: Show, interrupts: Interrupts) -> None:
        self._options = options
        self._show = show
        self._interrupts = interrupts
        self._result = DemoResult()
        self._undo = ExitStack()

    def run(self) -> DemoResult:
        """Everything, in order.

        Raises: DemoFailed; ServerFailed, RuntimeError when a process ends or says nothing;
            KeyboardInterrupt. No process is left then.
        """
        started = time.monotonic()
        result = self._result
        try:
            self._prepare()
            server = self._serve("first", "with kvd")
            result.cold = self._ask(server)
            self._look(server)
            self._end(server, kills=self._options.kills)
            server = self._serve("second", "with kvd, another process")
            result.hit = self._ask(server)
            self._end(server, kills=False)
            server = self._serve("stock", "without kvd, with memory for every layer")
            result.stock = self._ask(server)
        finally:
            with self._interrupts.held():
                self._undo.close()
        result.seconds = time.monotonic() - started
        return result

    # Acts -------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        options = self._options
        self._show.step(f"kvd with a pool of {options.pool_mib} MiB")
        with self._interrupts.held():
            folder = tempfile.TemporaryDirectory(prefix="kvd-model-")
            self._undo.callback(folder.cleanup)
            self._kvd = OwnDaemon(f"pool.size={options.pool_mib}MiB")
            self._undo.callback(self._kvd.close)
            self._kvd.start(wait=False)
        self._kvd.wait_ready()
        self._model = Path(folder.name)
        self._show.step("a Llama of 12 layers, its weights by chance")
        write_model(options.python, self._model, options.seed)

    def _serve(self, name: str, how: str) -> VllmServer:
        """Start a server and wait for it; its first request is a short one that nobody measures."""
        options = self._options
        is_stock = name == "stock"
        memory = options.stock_bytes if is_stock else options.device_bytes
        self._show.step(f"{name} vLLM server, {how}; {size(memory)} for KV")
        args = arguments(
            None if is_stock else self._transfer(),
            max_model_len=options.num_blocks * BLOCK_TOKENS,
            max_num_seqs=1,
            max_num_batched_tokens=CHUNK,
            kv_cache_memory_bytes=memory,
        )
        with self._interrupts.held():
            server = VllmServer(
                name, options.python, self._model, free_port(), *args, threads=options.threads
            )
            self._undo.callback(server.close)
        seconds = self._result.start_s[name] = server.wait_ready(self._show.fact)
        self._show.fact(f"it serves after {seconds:.0f} s")
        server.complete(WARM_UP * 4, 2)
        return server

    def _transfer(self) -> dict[str, Any]:
        return {
            "kv_connector": "KvdConnector",
            "kv_connector_module_path": "engine_shim.vllm",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "kvd_runtime_dir": str(self._kvd.runtime_dir),
                "offload": "rolling",
                "layerwise_num_shared_buffers": self._options.buffers,
            },
        }

    def _ask(self, server: VllmServer) -> Completion:
        options = self._options
        self._show.step(f"POST /v1/completions: {len(options.text)} tokens, {options.num_new} new")
        done = server.complete(options.text, options.num_new)
        self._show.fact(
            f"first token after {done.first_s:.2f} s, all after {done.seconds:.2f} s; "
            f"{done.num_cached} of {done.num_prompt} tokens were not computed"
        )
        if done.finish != "length" or len(done.tokens) != options.num_new:
            raise DemoFailed(
                f"server {server.name} gave {len(done.tokens)} tokens of {options.num_new} "
                f"({done.finish})"
            )
        return done

    def _look(self, server: VllmServer) -> None:
        """What the engine and kvd say of what was chosen."""
        said = [line for line in server.log().splitlines() if "KV cache reuse merged" in line]
        if not said:
            raise DemoFailed("the log of the first server does not say that buffers are reused")
        self._result.merge_line = said[0][said[0].index("Layerwise") :]
        self._show.fact(self._result.merge_line)
        code, document = self._kvd.get("/v1/engines")
        if code != 200 or len(document["items"]) != 1:
            raise DemoFailed(f"kvd does not show one engine, it answered {code}: {document}")
        self._result.engine = document["items"][0]["about"]
        self._show.step("kvctl engines")
        for line in self._kvctl("engines"):
            self._show.fact(line)

    def _kvctl(self, *args: str) -> list[str]:
        command = [sys.executable, "-m", "kvd.cli.kvctl"]
        command += ["--runtime-dir", str(self._kvd.runtime_dir), *args]
        done = subprocess.run(
            command,
            env=clean_environment() | {"COLUMNS": "200"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=KVCTL_SECONDS,
            check=False,
        )
        return [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]

    def _end(self, server: VllmServer, *, kills: bool) -> None:
        how = "kill -9 of" if kills else "SIGTERM to"
        self._show.step(f"{how} the {server.name} server")
        if kills:
            server.kill()
        else:
            server.stop()
        code, document = self._kvd.get("/v1/status")
        if code != 200:
            raise DemoFailed(f"status answered {code}: {document}")
        pool = document["pool"]
        self._result.pool.append(pool)
        self._show.fact(f"kvd's pool has {pool['blocks']['ready']} blocks that are ready")
