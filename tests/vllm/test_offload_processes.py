"""Engines in processes of their own: killed with -9, and with two ranks."""

from __future__ import annotations

from typing import Final

import pytest

from engine_shim.reference.demo.processes import pause
from tests.vllm.child import Child, Round
from tests.vllm.engines import Engine, assert_same, prompt
from tests.vllm.node import Node

pytestmark = pytest.mark.timeout(400)  # engines of several processes start in a minute under load

NEW_TOKENS: Final = 6
HOW: Final = {"max_num_batched_tokens": 256}
PAUSE_S: Final = 0.02
WAIT_STEPS: Final = 500


def asked() -> list[list[int]]:
    """Two requests of several chunks."""
    return [prompt(57, 500), prompt(58, 300)]


def torn() -> list[list[int]]:
    """What is computed when the engine is killed."""
    return [prompt(59, 1900), prompt(60, 1900)]


def wait_until_blocks(node: Node, state: str, least: int, most: int) -> int:
    """Wait until so many blocks are in a state; returns how many."""
    for _ in range(WAIT_STEPS):
        found = node.blocks()[state]
        if least <= found <= most:
            return found
        pause(PAUSE_S)
    raise AssertionError(f"{node.blocks()} never had {least} to {most} {state} blocks")


def test_what_a_killed_engine_committed_is_found_and_nothing_torn() -> None:
    with Engine("llama", enable_prefix_caching=False, **HOW) as engine:
        stock = engine.generate(asked(), NEW_TOKENS)
        stock_torn = engine.generate(torn(), NEW_TOKENS)
    with Node() as node:
        transfer = node.rolling(3)
        rounds = [Round(asked(), NEW_TOKENS), Round(torn(), 200)]
        with Child("llama", HOW | {"kv_transfer_config": transfer}, rounds) as child:
            child.wait_ready()
            assert_same(child.answers(), stock)
            saved = node.blocks()["ready"]
            assert saved == 5, "3 and 2 full blocks"
            wait_until_blocks(node, "ready", saved + 3, 1000)
            child.kill()
        wait_until_blocks(node, "filling", 0, 0)
        wait_until_blocks(node, "poisoned", 0, 0)
        assert not [engine for engine in node.engines() if engine["members"]]
        with Engine("llama", kv_transfer_config=transfer, **HOW) as engine:
            again = engine.generate(asked(), NEW_TOKENS)
            assert_same(again, stock)
            assert [answer.num_cached for answer in again] == [384, 256]
            assert_same(engine.generate(torn(), NEW_TOKENS), stock_torn)


def test_two_ranks_save_and_find_their_own_shards() -> None:
    with Engine("llama", enable_prefix_caching=False, **HOW) as engine:
        stock = engine.generate(asked(), NEW_TOKENS)
    with Node() as node:
        transfer = node.rolling(3)
        with Engine("llama", kv_transfer_config=transfer, **HOW) as engine:
            engine.generate(asked(), 1)
        arguments = HOW | {"kv_transfer_config": transfer, "tensor_parallel_size": 2}
        rounds = [Round(asked(), NEW_TOKENS)] * 2
        with Child("llama", arguments, rounds, processes=True) as child:
            child.wait_ready()
            members = {member["member"] for member in node.engines()[-1]["members"]}
            first, again = child.answers(), child.answers()
    # Two ranks add up in another order, so the last digits differ from one rank's.
    assert_same(first, stock, 3)
    assert_same(again, first)
    assert [answer.num_cached for answer in first] == [0, 0], "shards of one are none of two"
    assert [answer.num_cached for answer in again] == [384, 256]
    assert members == {"scheduler", "worker0", "worker1"}


def test_latent_rows_are_found_whatever_the_number_of_ranks() -> None:
    one = {"max_num_batched_tokens": 2048}
    with Node() as node:
        transfer = node.rolling(3)
        with Engine("deepseek_v2", kv_transfer_config=transfer, **one) as engine:
            first = engine.generate(asked(), NEW_TOKENS)
            again = engine.generate(asked(), NEW_TOKENS)
            how = {"attention_config": {"backend": "CPU_MLA"}}
        arguments = one | how | {"kv_transfer_config": transfer, "tensor_parallel_size": 2}
        rounds = [Round(asked(), NEW_TOKENS)]
        with Child("deepseek_v2", arguments, rounds, processes=True) as child:
            child.wait_ready()
            found = child.answers()
    assert [answer.tokens for answer in again] == [answer.tokens for answer in first]
    assert [answer.num_cached for answer in found] == [496, 288]
    assert_same(found, again, 3)
