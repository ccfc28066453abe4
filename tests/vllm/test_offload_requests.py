"""What happens to requests: hits across engines, preemption, abort, a full pool, resident mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from tests.vllm.engines import Answer, Engine, abort_at_each_step, assert_same, prompt
from tests.vllm.node import Node

NEW_TOKENS: Final = 6
HOW: Final = {"max_num_batched_tokens": 256}


def asked() -> list[list[int]]:
    """Three requests."""
    return [prompt(47, 500), prompt(48, 300), prompt(49, 420)]


@pytest.fixture(scope="module")
def stock() -> list[Answer]:
    with Engine("llama", enable_prefix_caching=False, **HOW) as engine:
        return engine.generate(asked(), NEW_TOKENS)


def test_what_one_engine_saved_another_finds_whatever_its_mode(stock: list[Answer]) -> None:
    with Node() as node:
        resident = node.transfer(offload="resident")
        for transfer, hits in (
            (resident, [0, 0, 0]),
            (node.rolling(3), [384, 256, 384]),
            (node.rolling(1), [384, 256, 384]),
            (resident, [384, 256, 384]),
        ):
            with Engine("llama", kv_transfer_config=transfer, **HOW) as engine:
                got = engine.generate(asked(), NEW_TOKENS)
            assert_same(got, stock)
            assert [answer.num_cached for answer in got] == hits


def test_a_prefix_is_found_where_two_prompts_part(stock: list[Answer]) -> None:
    shared = asked()[0][:256]
    longer = [shared + prompt(50, 200), shared + prompt(51, 300)]
    with Engine("llama", enable_prefix_caching=False, **HOW) as engine:
        wanted = engine.generate(longer, NEW_TOKENS)
    with Node() as node, Engine("llama", kv_transfer_config=node.rolling(2), **HOW) as engine:
        assert_same(engine.generate(asked(), NEW_TOKENS), stock)
        got = engine.generate(longer, NEW_TOKENS)
        assert_same(got, wanted)
        assert [answer.num_cached for answer in got] == [256, 256]


def test_preempted_requests_come_back_with_what_they_had(stock: list[Answer]) -> None:
    # Eleven blocks besides the null block: three requests of 4, 3 and 4 blocks grow by one each.
    long = 140
    with Engine("llama", enable_prefix_caching=False, **HOW) as engine:
        wanted = engine.generate(asked(), long)
    how = HOW | {"num_gpu_blocks_override": 12, "max_model_len": 1024}
    with Node() as node:
        for transfer in (node.rolling(3), node.transfer(offload="resident")):
            with Engine("llama", kv_transfer_config=transfer, **how) as engine:
                scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
                preempted = count_calls(scheduler, "_preempt_request")
                assert_same(engine.generate(asked(), long), wanted)
                assert preempted, "nothing was preempted: the test tests nothing"


def count_calls(owner: Any, name: str) -> list[str]:
    """Note each call of a method of one object."""
    calls: list[str] = []
    method = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return method(*args, **kwargs)

    setattr(owner, name, counted)
    return calls


def test_an_abort_at_any_step_leaves_nothing_pinned(stock: list[Answer]) -> None:
    with Node() as node, Engine("llama", kv_transfer_config=node.rolling(2), **HOW) as engine:
        abort_at_each_step(engine, 400, NEW_TOKENS)
        assert_same(engine.generate(asked(), NEW_TOKENS), stock)
        (seen,) = node.engines()
        assert (seen["requests"], node.blocks()["filling"]) == (0, 0)


def test_more_requests_than_the_pool_holds_wait_for_their_turn(stock: list[Answer]) -> None:
    # Twelve blocks of 384 KiB: two of the three requests at once, at most.
    with Node("pool.size=4718592B", "pool.low_water=1.0", "pool.high_water=1.0") as node:
        how = HOW | {"max_model_len": 640}
        with Engine("llama", kv_transfer_config=node.rolling(3), **how) as engine:
            assert engine.num_blocks == 13, "the block count is bounded by the pool"
            assert_same(engine.generate(asked(), NEW_TOKENS), stock)
            assert_same(engine.generate(asked(), NEW_TOKENS), stock)


def test_a_demand_for_more_blocks_than_the_pool_has_is_cut(stock: list[Answer]) -> None:
    """vLLM itself takes `num_gpu_blocks_override` as it is."""
    with Node("pool.size=4718592B", "pool.low_water=1.0", "pool.high_water=1.0") as node:
        how = HOW | {"max_model_len": 640, "num_gpu_blocks_override": 500}
        with Engine("llama", kv_transfer_config=node.rolling(3), **how) as engine:
            assert engine.num_blocks == 13
            assert_same(engine.generate(asked(), NEW_TOKENS), stock)


def test_auto_decides_by_what_fits(stock: list[Answer]) -> None:
    with Node() as node:
        auto = node.transfer(layerwise_num_shared_buffers=3)
        fits = HOW | {"max_model_len": 1024, "max_num_seqs": 4}
        with Engine("llama", kv_transfer_config=auto, **fits) as engine:
            assert "resident" in offload_of(node)
            assert_same(engine.generate(asked(), NEW_TOKENS), stock)
        large = HOW | {"max_model_len": 8192, "max_num_seqs": 4}
        with Engine("llama", kv_transfer_config=auto, **large) as engine:
            assert "rolling" in offload_of(node)
            assert_same(engine.generate(asked(), NEW_TOKENS), stock)


def test_many_requests_with_shared_prefixes_while_blocks_are_evicted() -> None:
    stems = [prompt(70 + at, 256) for at in range(3)]
    many = [stems[at % 3][: 128 * (at % 2 + 1)] + prompt(80 + at, 60 + 9 * at) for at in range(18)]
    how = HOW | {"max_model_len": 640}
    with Engine("llama", enable_prefix_caching=False, **how) as engine:
        wanted = engine.generate(many, NEW_TOKENS)
    # 12 blocks: requests that run leave little room for what others would find.
    with Node("pool.size=4718592B") as node:
        with Engine("llama", kv_transfer_config=node.rolling(2), **how) as engine:
            for _ in range(2):
                got = engine.generate(many, NEW_TOKENS)
                assert_same(got, wanted)
            assert any(answer.num_cached for answer in got), "nothing was ever found"
        assert node.counter("blocks_evicted") > 0
        assert node.counter("checksum_mismatches") == 0


def test_as_a_child_of_multi_connector(stock: list[Answer], tmp_path: Path) -> None:
    with Node() as node:
        ours = node.rolling(3)
        other = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        }
        policy = ours.pop("kv_load_failure_policy")
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_producer",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"connectors": [ours, other]},
        }
        with Engine("llama", kv_transfer_config=transfer, **HOW) as engine:
            assert_same(engine.generate(asked(), NEW_TOKENS), stock)
            again = engine.generate(asked(), NEW_TOKENS)
            assert_same(again, stock)
            assert [answer.num_cached for answer in again] == [384, 256, 384]


def offload_of(node: Node) -> str:
    """What kvd's status says of its one engine."""
    (engine,) = node.engines()
    return str(engine["about"]["offload"])
