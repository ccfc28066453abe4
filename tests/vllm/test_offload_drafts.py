"""Speculative decoding with a draft (MTP) layer on rolling buffers.

The draft layer's rows rotate behind those of the model. Most guesses are wrong: their rows are
taken back, in the buffers as in the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest

from engine_shim.steps import StepFailed
from engine_shim.testing import Delay, Rule
from engine_shim.vllm.worker import WorkerSide
from tests.vllm import tamper
from tests.vllm.engines import Answer, Engine, assert_same, prompt
from tests.vllm.node import Node

NEW_TOKENS: Final = 24
MS: Final = 1_000_000
LATE: Final = (
    Rule(Delay(3 * MS), stream="save", kind="copy"),
    Rule(Delay(3 * MS), stream="load", kind="copy"),
)
CHUNKED: Final = {"max_num_batched_tokens": 256}
LATENT: Final = {
    "max_num_batched_tokens": 2048,  # its attention takes no chunks
    "attention_config": {"backend": "CPU_MLA"},
}


def asked() -> list[list[int]]:
    """Prompts whose answers repeat themselves here and there, where the guess is right."""
    return [prompt(1, 300), prompt(2, 100)]


def guessing(count: int, how: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an engine that guesses so many tokens a step."""
    config: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": count}
    if "attention_config" in how:
        config["attention_backend"] = how["attention_config"]["backend"]
    return {**how, "speculative_config": config, "disable_log_stats": False}


def num_accepted(engine: Engine) -> int:
    """Guesses that were right."""
    name = "vllm:spec_decode_num_accepted_tokens"
    return sum(int(it.value) for it in engine.llm.get_metrics() if it.name == name)


@pytest.fixture(autouse=True)
def failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No step fails: guesses that are not taken would hide it."""
    found: list[StepFailed] = []
    monkeypatch.setattr(WorkerSide, "_fail", lambda _, failure: found.append(failure))
    yield
    assert not found


def said(node: Node) -> str:
    """What the engine says of its buffers."""
    (engine,) = [engine for engine in node.engines() if engine["members"]]
    return str(engine)


def stock(model: str, how: Mapping[str, Any]) -> list[Answer]:
    """What the model says without kvd, with the same guesses where a run has guesses.

    A step that verifies positions has matrices of another shape than one that does not. Where the
    kernels of a processor add in another order then, as on Zen 4, a near tie among the indexer's
    scores selects another row, and vLLM itself says something else.
    """
    with Engine(model, enable_prefix_caching=False, **how) as engine:
        return engine.generate(asked(), NEW_TOKENS)


@pytest.mark.parametrize(
    ("model", "how", "count"),
    [
        ("deepseek_v32_mtp", CHUNKED, 1),
        ("deepseek_v32_mtp", CHUNKED, 3),
        ("deepseek_v3_mtp", LATENT, 2),
    ],
)
def test_guesses_change_no_answer(
    model: str, how: Mapping[str, Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = stock(model, guessing(count, how))
    tamper.faulty_device(monkeypatch, LATE)
    with Node() as node:
        transfer = node.rolling(3)
        with Engine(model, kv_transfer_config=transfer, **guessing(count, how)) as engine:
            assert_same(engine.generate(asked(), NEW_TOKENS), wanted)
            assert num_accepted(engine) > 0
            assert "7 layers" in said(node), "the draft layer's rows rotate, too"
            size = engine.block_tokens
            again = engine.generate(asked(), NEW_TOKENS)
            assert_same(again, wanted)
            # The last block that was found is computed again: the draft layer's rows in it may
            # have been those of a request that went on with another token.
            found = [(len(tokens) - 1) // size * size - size for tokens in asked()]
            assert [answer.num_cached for answer in again] == [max(0, it) for it in found]
        with Engine(model, kv_transfer_config=transfer, **guessing(count, how)) as engine:
            assert_same(engine.generate(asked(), NEW_TOKENS), wanted)


def test_steps_without_guesses_at_the_end_of_the_context_keep_the_gate_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no guess fits any more the draft layer is not run: its slot is let go all the same."""
    how = {**CHUNKED, "max_model_len": 320}
    prompts = [prompt(1, 300), prompt(2, 290)]
    with Engine("deepseek_v32_mtp", enable_prefix_caching=False, **guessing(3, how)) as engine:
        wanted = engine.generate(prompts, 20)
    tamper.faulty_device(monkeypatch, LATE)
    with (
        Node() as node,
        Engine(
            "deepseek_v32_mtp", kv_transfer_config=node.rolling(2), **guessing(3, how)
        ) as engine,
    ):
        assert_same(engine.generate(prompts, 20), wanted)
        assert_same(engine.generate(prompts, 20), wanted)


def test_resident_buffers_save_and_find_what_was_guessed_right() -> None:
    wanted = stock("deepseek_v32_mtp", guessing(2, CHUNKED))
    with Node() as node:
        transfer = node.transfer(offload="resident")
        for _ in range(2):
            with Engine(
                "deepseek_v32_mtp", kv_transfer_config=transfer, **guessing(2, CHUNKED)
            ) as engine:
                answers = engine.generate(asked(), NEW_TOKENS)
                assert_same(answers, wanted)
        assert [answer.num_cached for answer in answers] == [128, 0]
