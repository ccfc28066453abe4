"""Waiting for what other threads bring about, and for refusals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from engine_shim.client import KvdClient, KvdRefused, LinkState


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for a condition that another thread brings about."""
    end = time.monotonic() + seconds
    pause = threading.Event()  # a spinning test would keep the others off the interpreter
    while not condition():
        assert time.monotonic() < end, "the condition did not come about"
        pause.wait(0.001)


def refusal(call: Callable[[], object]) -> KvdRefused:
    with pytest.raises(KvdRefused) as caught:
        call()
    return caught.value


class Background:
    """A call on a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.result: object = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except KvdRefused as error:
            self.result = error.code

    def wait(self) -> object:
        self._thread.join()
        return self.result


def lost(client: KvdClient) -> None:
    until(lambda: client.state is LinkState.LOST)


def attached(client: KvdClient, times: int) -> None:
    until(lambda: client.statistics().attaches == times and client.state is LinkState.ATTACHED)
