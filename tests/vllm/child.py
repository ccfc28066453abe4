"""An engine in a process of its own, for tests that kill it or give it several ranks.

`python -m tests.vllm.child` reads one JSON document from its input, {model, arguments, rounds,
waits}, and answers each round's prompts with one JSON line; `Child` is the other end. If it waits,
each round but the first begins with another line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from engine_shim.reference.demo.leash import popen
from engine_shim.reference.demo.processes import kill
from tests.vllm.engines import Answer

ROOT: Final = Path(__file__).resolve().parents[2]
READY: Final = "ready"


@dataclass(frozen=True, slots=True)
class Round:
    """Prompts that are asked at once, and how many tokens each gets."""

    prompts: Sequence[Sequence[int]]
    num_tokens: int


class Child:
    """An engine in another process; it is killed at the end, if not before."""

    def __init__(
        self,
        model: str,
        arguments: Mapping[str, Any],
        rounds: Sequence[Round],
        *,
        processes: bool = False,
        waits: bool = False,
    ) -> None:
        """Start it.

        Args: processes: scheduler and workers are processes of their own, as in a server.
              waits: between rounds, for `go_on`.
        """
        environment = dict(os.environ)
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if processes else "0"
        self.process = popen(
            [sys.executable, "-m", "tests.vllm.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
            process_group=0,
        )
        order = {
            "model": model,
            "arguments": dict(arguments),
            "rounds": [[list(map(list, one.prompts)), one.num_tokens] for one in rounds],
            "waits": waits,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        if not waits:
            self.process.stdin.close()

    def go_on(self) -> None:
        """Begin the next round."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def _line(self) -> str:
        """The next line meant for us; what vLLM prints is shown beside a test that fails."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"child: "):
                return line.removeprefix(b"child: ").decode().strip()
            sys.stderr.write(line.decode(errors="replace"))
        raise AssertionError(f"the engine ended with {self.process.wait(30)}")

    def wait_ready(self) -> None:
        """Wait until the engine can be asked."""
        assert self._line() == READY

    def answers(self) -> list[Answer]:
        """The answers of the next round."""
        return [
            Answer(tuple(tokens), tuple(logprobs), tuple({} for _ in tokens), finish, cached, None)
            for tokens, logprobs, finish, cached in json.loads(self._line())
        ]

    def kill(self) -> None:
        """kill -9, of all its processes: those of vLLM outlive the one that started them."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        kill(self.process)

    def wait(self) -> int:
        """Wait for its own end."""
        return self.process.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self.process.stdout.close()
        self.process.stdin.close()


def main() -> None:
    """Be the child."""
    from tests.vllm.engines import Engine

    order = json.loads(sys.stdin.readline())
    with Engine(order["model"], **order["arguments"]) as engine:
        print(f"child: {READY}", flush=True)
        for number, (prompts, num_tokens) in enumerate(order["rounds"]):
            if number and order["waits"]:
                sys.stdin.readline()
            told = [
                (answer.tokens, answer.logprobs, answer.finish, answer.num_cached)
                for answer in engine.generate(prompts, num_tokens)
            ]
            print(f"child: {json.dumps(told)}", flush=True)


if __name__ == "__main__":
    main()
