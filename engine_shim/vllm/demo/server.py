"""One vLLM server with the OpenAI API as a child process: started, asked, ended in two ways."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self

from engine_shim.reference.demo.leash import popen
from engine_shim.reference.demo.processes import clean_environment, pause

START_SECONDS: Final = 300.0
REQUEST_SECONDS: Final = 600.0
STOP_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.2
TELL_SECONDS: Final = 10.0
TAIL: Final = 2000

VARIABLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM's own binding takes a core away
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # processes of its own, as where people serve
        "PYTHONHASHSEED": "0",  # block hashes must be the same in every engine
        "PYTHONUNBUFFERED": "1",
    }
)
"""What the servers need beside their arguments: nothing asks a hub, reports use, or compiles."""

OWN_FOLDERS: Final = ("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "HF_HOME")

_SAID: Final = re.compile(r"^\(.* INFO [^\[]*\[[^\]]*\]\s+([A-Z][^{}=\n]*)$", re.MULTILINE)
"""What vLLM tells, without who, when and where it does."""

Tell = Callable[[str], None]


class ServerFailed(RuntimeError):
    """A server ended, said nothing in time, or refused a request; the text says which."""


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer.

    first_s:    seconds from the request to its first token (TTFT).
    seconds:    to its last one.
    num_cached: tokens of the prompt that were not computed.
    """

    tokens: tuple[int, ...]
    first_s: float
    seconds: float
    num_prompt: int
    num_cached: int
    finish: str


class VllmServer:
    """A server and all of its processes; they end when this one does, however it ends."""

    def __init__(
        self, name: str, python: str, model: Path, port: int, *args: str, threads: int = 1
    ) -> None:
        """Start it.

        Args: python: interpreter of the environment that has vLLM.
              args: of `vllm serve`.
              threads: of its computations.
        """
        self.name = name
        self._port = port
        self._directory = tempfile.TemporaryDirectory(prefix="kvd-vllm-")
        self._log_path = Path(self._directory.name) / "log"
        self.started = time.monotonic()
        serve = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        serve += ["--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port), *args]
        guard = [sys.executable, "-m", "engine_shim.vllm.demo.guard", *serve]
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(
                guard, stdin=subprocess.PIPE, stdout=log, stderr=log, env=self._environment(threads)
            )

    def _environment(self, threads: int) -> dict[str, str]:
        own = dict.fromkeys(OWN_FOLDERS, self._directory.name)
        return {**clean_environment(), **VARIABLES, **own, "OMP_NUM_THREADS": str(threads)}

    def wait_ready(self, tell: Tell, seconds: float = START_SECONDS) -> float:
        """Wait until it serves; returns the seconds since it was started.

        Args: tell: hears now and then what it waits for.
        Raises: ServerFailed.
        """
        told = self.started
        while not self._is_ready():
            now = time.monotonic()
            if self.process.poll() is not None:
                raise self._failed(f"ended with code {self.process.returncode} at its start")
            if now - self.started > seconds:
                raise self._failed(f"does not serve after {seconds:.0f} s")
            if now - told >= TELL_SECONDS:
                told = now
                tell(f"{now - self.started:.0f} s, {self._last_said()}")
            pause(POLL_SECONDS)
        return time.monotonic() - self.started

    def _is_ready(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def complete(self, text: str, num_new: int, **params: Any) -> Completion:
        """Complete a text greedily, to the full number of tokens.

        Raises: ServerFailed.
        """
        asked = {
            "model": "demo",
            "prompt": text,
            "max_tokens": num_new,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **params,
        }
        connection = HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_SECONDS)
        try:
            return self._completion(connection, json.dumps(asked))
        except (OSError, HTTPException) as error:
            raise self._failed(f"broke off a request ({error})") from error
        finally:
            connection.close()

    def _completion(self, connection: HTTPConnection, asked: str) -> Completion:
        began = time.monotonic()
        connection.request("POST", "/v1/completions", asked, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            said = response.read().decode(errors="replace")
            raise self._failed(f"answered {response.status}: {said[:TAIL]}")
        tokens: list[int] = []
        usage: dict[str, Any] = {}
        first_s, finish = 0.0, None
        for line in response:
            event = line.removeprefix(b"data:").strip()
            if event == b"[DONE]":
                break
            if not event:
                continue
            said = json.loads(event)
            if "error" in said:
                raise self._failed(f"ended a request: {said['error']}")
            for choice in said["choices"]:
                tokens += choice.get("token_ids") or ()
                finish = choice.get("finish_reason") or finish
                if tokens and not first_s:
                    first_s = time.monotonic() - began
            usage = said.get("usage") or usage
        else:
            finish = None
        # A server that is told to end closes its streams in good order, with nothing said of why.
        if finish is None:
            raise self._failed(f"broke off a request after {len(tokens)} tokens")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        seconds = time.monotonic() - began
        return Completion(tuple(tokens), first_s, seconds, usage["prompt_tokens"], cached, finish)

    def log(self) -> str:
        """All that it has logged."""
        return self._log_path.read_text(encoding="utf-8", errors="replace")

    def _last_said(self) -> str:
        said = _SAID.findall(self.log())
        return f"it says: {said[-1].strip()[:60]}" if said else "nothing said yet"

    def _failed(self, what: str) -> ServerFailed:
        return ServerFailed(f"server {self.name} {what}\n{self.log()[-TAIL:].strip()}")

    def terminate(self) -> None:
        """SIGTERM to its first process, as a service manager does; it may take its time."""
        stream = self.process.stdin
        assert stream is not None
        with suppress(BrokenPipeError):  # it has ended already
            stream.write(f"{signal.SIGTERM.value}\n".encode())
            stream.flush()

    def stop(self) -> int:
        """The same, and wait for its end; returns the exit status."""
        self.terminate()
        return self.process.wait(STOP_SECONDS)

    def kill(self) -> int:
        """kill -9 of all of its processes, and wait until they are gone."""
        stream = self.process.stdin
        assert stream is not None
        with suppress(BrokenPipeError):
            stream.close()
        return self.process.wait(STOP_SECONDS)

    def close(self) -> None:
        """End it, whatever state it is in, and remove what it wrote."""
        self.kill()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def write_model(python: str, into: Path, seed: int) -> None:
    """Have vLLM's environment write the demo's model.

    Raises: ServerFailed.
    """
    command = [python, "-m", "engine_shim.vllm.demo.model", str(into), str(seed)]
    environment = clean_environment() | {"OMP_NUM_THREADS": "1"}
    process = popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    try:
        output, _ = process.communicate(timeout=START_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode != 0:
        said = output.decode(errors="replace")[-TAIL:].strip()
        raise ServerFailed(f"the model could not be made with {python}: {said}")


def arguments(transfer: Mapping[str, Any] | None, **options: int) -> Sequence[str]:
    """Return arguments of `vllm serve`: numbers by name, what all servers have, a connector."""
    made = ["--dtype", "float32", "--enforce-eager", "--enable-prompt-tokens-details"]
    made += ["--seed", "0"]
    for name, value in options.items():
        made += [f"--{name.replace('_', '-')}", str(value)]
    if transfer is not None:
        made += ["--kv-transfer-config", json.dumps(transfer)]
    return made
