"""Each tiny model generates in a real vLLM, and says the same wherever it is asked."""

from __future__ import annotations

import pytest

from tests.vllm.engines import Engine, assert_same, prompt

PLAIN = ("llama", "qwen3", "deepseek_v2", "deepseek_v3")
OTHER_SHAPES_DIGITS = 4  # a matrix of another size may be summed in another order


@pytest.mark.parametrize("name", PLAIN)
def test_model_says_the_same_twice_and_in_any_place(name: str) -> None:
    prompts = [prompt(1, 200), prompt(2, 70)]
    with Engine(name, enable_prefix_caching=False) as engine:
        together = engine.generate(prompts, 8)
        assert_same(engine.generate(prompts, 8), together, digits=9)
        alone = [engine.generate([one], 8)[0] for one in prompts]
    assert_same(alone, together, OTHER_SHAPES_DIGITS)
    first, second = (answer.tokens for answer in together)
    assert first != second
    assert len({*first, *second}) > 4, "tokens hardly vary"
