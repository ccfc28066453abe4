"""Each tiny model generates in a real vLLM, and says the same twice."""

from __future__ import annotations

import pytest

from tests.vllm.engines import Engine, assert_same, prompt

PLAIN = ("llama", "qwen3", "deepseek_v2", "deepseek_v3")


@pytest.mark.parametrize("name", PLAIN)
def test_model_says_the_same_twice(name: str) -> None:
    prompts = [prompt(1, 200), prompt(2, 70)]
    with Engine(name, enable_prefix_caching=False) as engine:
        first = engine.generate(prompts, 8)
        assert_same(engine.generate(prompts, 8), first)
    assert all(len(set(answer.tokens)) > 4 for answer in first), "tokens hardly vary"
    assert len({answer.tokens for answer in first}) == len(prompts)
