"""`vllm serve`: how its processes end leaves nothing behind in kvd, and what it saved is found."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from engine_shim.reference.bytes_tokenizer import long_text
from engine_shim.reference.demo.run import free_port
from engine_shim.vllm.demo.server import ServerFailed, VllmServer, arguments
from tests.e2e.pair import until
from tests.vllm import models
from tests.vllm.node import Node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LENGTH: Final = 900
NEW_TOKENS: Final = 12
ENDLESS: Final = 3000
SECONDS: Final = 60.0


@contextmanager
def serving(node: Node) -> Iterator[VllmServer]:
    """A server on rolling buffers that serves."""
    args = arguments(
        node.rolling(3),
        max_model_len=4096,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=64 << 20,
    )
    with VllmServer("served", sys.executable, models.model("llama"), free_port(), *args) as server:
        server.wait_ready(lambda _: None)
        yield server


@contextmanager
def endless_request(server: VllmServer, node: Node) -> Iterator[None]:
    """In here a request of the server runs, and keeps blocks; it is broken off, not answered."""
    ends: list[str] = []

    def ask() -> None:
        try:
            done = server.complete("endless " * 60, ENDLESS)
            ends.append("broken off" if done.finish == "abort" else f"answered: {done}")
        except ServerFailed:
            ends.append("broken off")

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        until(lambda: pool(node)["pinned_blocks"] > 0, lambda: pool(node), SECONDS)
        yield
    finally:
        server.kill()
        asking.join(SECONDS)
    assert ends == ["broken off"]


def pool(node: Node) -> Any:
    """Kvd's status of its pool."""
    status, document = node.get("/v1/status")
    assert status == 200, document
    return document["pool"]


def left(node: Node) -> tuple[int, int, int]:
    """What engines have in kvd: members, pinned blocks, blocks that are being filled."""
    members = sum(len(engine["members"]) for engine in node.get("/v1/engines")[1]["items"])
    return members, pool(node)["pinned_blocks"], pool(node)["blocks"]["filling"]


def test_killed_and_stopped_servers_leave_nothing_but_what_others_find() -> None:
    text = long_text(LENGTH)
    answers = []
    with Node() as node:
        for end in (VllmServer.kill, VllmServer.terminate):
            with serving(node) as server:
                answers.append(server.complete(text, NEW_TOKENS))
                with endless_request(server, node):
                    assert left(node)[0] == 2
                    end(server)
                    until(lambda: left(node) == (0, 0, 0), lambda: left(node), SECONDS)
            assert pool(node)["blocks"]["poisoned"] == 0
        assert pool(node)["blocks"]["ready"] >= LENGTH // 128
    first, second = answers
    assert second.tokens == first.tokens
    assert len(first.tokens) == NEW_TOKENS
    assert [answer.num_cached for answer in answers] == [0, (LENGTH - 1) // 128 * 128]
