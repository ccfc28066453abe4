"""An engine in a process of its own that stops in the middle of a step, to be killed there.

`python -m tests.e2e.kept_engine RUNTIME_DIR` reads one JSON order a line: a prompt to prefill, and
the layer at which to stop in the first step. There it says what kvd keeps of the step, and waits
for another line. At the end it says what came of it: every row is compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from engine_shim.client import KvdClient, KvdRefused, MemberIdentity
from engine_shim.device_cpu import CpuDevice
from engine_shim.pipeline import PipelineOptions, PrefillPipeline
from engine_shim.requests import RequestPool
from engine_shim.ring import device_layout
from engine_shim.steps import StepFailed
from kvd.plan.layout import BlockLayout
from kvd.plan.ring import plan_ring
from kvd.wire.layout import BlockLayoutSpec
from tests.unit.engine_shim.test_pipeline import BLOCK, MAX_TOKENS, PARTS, Engine

ROOT: Final = Path(__file__).parents[2]


class KeptEngine:
    """Starts one, and talks to it; kills it at the end."""

    def __init__(self, runtime_dir: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.kept_engine", str(runtime_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        assert self.hear() == {"ready": True}

    def say(self, order: Mapping[str, Any]) -> None:
        """Give an order, or let it go on."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """What it says next."""
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline())
        assert isinstance(answer, dict)
        return answer

    def ask(self, name: str, text: str, stop_at: int = -1) -> dict[str, Any]:
        """Prefill a prompt, until it stops or has ended."""
        self.say({"name": name, "text": text, "stop_at": stop_at})
        return self.hear()

    def kill(self) -> None:
        """kill -9, and wait until it is dead."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


# In the process -----------------------------------------------------------------------------------


class LiveEngine(Engine):
    """The engine of the pipeline's tests, at a real kvd."""

    def __init__(self, runtime_dir: str, undo: ExitStack) -> None:
        spec = BlockLayoutSpec("pattern", "uint8", BLOCK, PARTS)
        self.ring = plan_ring(
            [tuple(parts) for parts in PARTS],
            num_shared=2,
            num_blocks=MAX_TOKENS // BLOCK,
            block_tokens=BLOCK,
            lookahead=1,
        )
        device = CpuDevice()
        device.bind_thread()
        undo.callback(device.close, 5_000_000_000)
        self.layout, size = device_layout(self.ring)
        memory = device.alloc(size, "slots")
        undo.callback(memory.close)
        identity = MemberIdentity(
            engine="kept",
            member="rank0",
            is_scheduler=True,
            rank=0,
            contributes=True,
            layout=spec,
            num_slots=len(self.ring.slots),
            device=self.layout,
            memory_fd=memory.fd,
            memory_bytes=size,
        )
        self.client = KvdClient(identity, runtime_dir)
        undo.callback(self.client.close)
        self.client.open()
        self.device, self.memory = device, memory
        self.pipeline = PrefillPipeline(
            self.client,
            device,
            self.ring,
            memory,
            self.layout,
            BlockLayout(spec),
            PipelineOptions(close_s=5.0),
        )
        undo.callback(self.pipeline.close)
        self.pool = RequestPool(self.client, BLOCK)
        self.device_blocks = tuple(range(MAX_TOKENS // BLOCK))
        self.start, self.unsaved = 0, ()
        self.before_write = lambda layer: None


def _say(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _obey(engine: LiveEngine, order: Mapping[str, Any]) -> None:
    stop_at = [order["stop_at"]]

    def stop(layer: int) -> None:
        step = engine.pipeline._step
        if layer in stop_at and step is not None:
            stop_at.clear()
            kept = [one for one in (step.kept_loads, step.kept_saves) if one is not None]
            _say({"at": layer, "kept": [one.answer.wait(10.0) == "" for one in kept]})
            sys.stdin.readline()

    engine.before_write = stop
    engine.client.wait_attached(20.0)
    try:
        _say({"hit": engine.prefill(order["name"], order["text"])})
    except (KvdRefused, StepFailed) as error:
        engine.pipeline.forget(order["name"])
        _say({"code": error.code})


def main() -> None:
    """Obey until there are no more orders."""
    with ExitStack() as undo:
        engine = LiveEngine(sys.argv[1], undo)
        _say({"ready": True})
        for line in iter(sys.stdin.readline, ""):
            _obey(engine, json.loads(line))


if __name__ == "__main__":
    main()
