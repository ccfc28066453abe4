"""The helpers of this tier: a refused engine is in nobody's way, and differences can be read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.vllm.engines import Answer, Engine, assert_same, prompt

SAID = Answer((7, 8), (-0.5, -1.0), ({7: -0.5, 9: -2.0}, {8: -1.0, 9: -3.0}), "length", 0, None)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (replace(SAID, tokens=(7,), finish="error"), r"answer 1: 1 tokens, wanted 2 \(error\)"),
        (replace(SAID, tokens=(7, 9)), "answer 1: token 1 is 9, wanted 8; 1 of 2 agree"),
        (replace(SAID, logprobs=(-0.5, -1.1)), r"of token 1 \(8\) differ by 1\.00e-01"),
        (replace(SAID, top=({7: -0.5, 9: -2.1}, SAID.top[1])), "of token 0 .* differ by 1"),
    ],
)
def test_difference_is_named(other: Answer, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        assert_same([SAID, other], [SAID, SAID])


def test_other_number_of_answers_is_a_difference() -> None:
    with pytest.raises(ValueError, match="zip"):
        assert_same([SAID], [SAID, SAID])


def test_likely_tokens_that_one_alone_names_do_not_count() -> None:
    assert_same([replace(SAID, top=({7: -0.5, 10: -2.0}, SAID.top[1]))], [SAID])


def test_small_difference_is_none_at_fewer_digits() -> None:
    near = replace(SAID, logprobs=(-0.5, -1.00003))
    assert_same([near], [SAID], digits=4)
    with pytest.raises(AssertionError, match="differ by 3"):
        assert_same([near], [SAID], digits=5)


def test_what_follows_a_hit_may_differ_by_a_digit_more() -> None:
    near = replace(SAID, logprobs=(-0.5, -1.00003))
    with pytest.raises(AssertionError, match="differ by 3"):
        assert_same([near], [SAID])
    assert_same([replace(near, num_cached=SAID.num_cached + 16)], [SAID])
    with pytest.raises(AssertionError, match="differ by 3"):
        assert_same([replace(near, num_cached=SAID.num_cached + 16)], [SAID], digits=5)


def test_prompts_of_two_seeds_begin_differently() -> None:
    assert prompt(1, 50) == prompt(1, 80)[:50]
    assert prompt(1, 16) != prompt(2, 16)


def test_refused_engine_is_not_in_the_way_of_the_next() -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        Engine("llama", max_model_len=1 << 20)
    with pytest.raises(ValueError, match="No available memory"):
        Engine("llama", kv_cache_memory_bytes=1 << 10)
    with Engine("llama") as engine:
        answers = engine.generate([prompt(1, 2 * engine.block_tokens + 9)], 2)
        assert answers[0].num_cached == 0
        again = engine.generate([prompt(1, 2 * engine.block_tokens + 9)], 2)
        assert again[0].num_cached == 2 * engine.block_tokens
        assert engine.num_blocks > 0
        assert len(engine.layers) == 6
    engine.close()
