"""Sparse attention on the CPU platform: against other attentions, other chunks and other places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from engine_shim.vllm import cpu_sparse, sparse_math
from tests.vllm import models
from tests.vllm.engines import Answer, Engine, assert_same, prompt

SPARSE = ("deepseek_v32", "glm_moe_dsa")
ALL_SELECTED = 2048
PROMPTS = (prompt(1, 300), prompt(2, 170))
NUM_TOKENS = 6
OTHER_KERNELS_DIGITS = 4  # sums in another order, over six layers
CHUNK = 128


def generate(
    model: str | Path, prompts: Sequence[Sequence[int]], **arguments: object
) -> list[Answer]:
    """Generate with an engine of its own, without hits of earlier prompts."""
    with Engine(model, enable_prefix_caching=False, **arguments) as engine:
        return engine.generate(prompts, NUM_TOKENS)


# --- what is skipped or refused -------------------------------------------------------------------


def test_negative_slots_are_skipped() -> None:
    store = cpu_sparse.PagedRows()
    cache = torch.full((3, 16, 576), 7.0)
    store.write(cache, torch.tensor([-1, -1]), torch.zeros(2, 576))
    assert bool((cache == 7).all())
    store.write(cache, torch.tensor([-1, 20, -1, 47]), torch.zeros(4, 576))
    changed = (cache != 7).any(-1).view(-1).nonzero().flatten()
    assert changed.tolist() == [20, 47]


def test_unknown_vllm_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    from engine_shim.vllm.errors import UnsupportedEngine

    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with pytest.raises(UnsupportedEngine, match=r"knows vLLM 0\.32\.x, this is 0\.33\.0"):
        cpu_sparse.install()


def test_second_install_changes_nothing() -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms.cpu import CpuPlatform

    cpu_sparse.install()
    choose, rotate = CpuPlatform.get_attn_backend_cls.__func__, RotaryEmbedding.forward_cpu
    cpu_sparse.install()
    assert CpuPlatform.get_attn_backend_cls.__func__ is choose
    assert RotaryEmbedding.forward_cpu is rotate


# --- what is computed -----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=SPARSE)
def sparse(request: pytest.FixtureRequest) -> tuple[str, list[Answer]]:
    """A model, and what it says to both prompts, computed together, each in one step."""
    return request.param, generate(request.param, PROMPTS)


def test_chunks_and_hits_do_not_matter(sparse: tuple[str, list[Answer]]) -> None:
    """A selection that lost or swapped a token would show: half of a prompt is not selected."""
    name, together = sparse
    with Engine(name, max_num_batched_tokens=CHUNK) as engine:
        computed = engine.generate(PROMPTS, NUM_TOKENS)
        found = engine.generate(PROMPTS, NUM_TOKENS)
        whole_blocks = [len(one) // engine.block_tokens * engine.block_tokens for one in PROMPTS]
    assert [answer.num_cached for answer in computed] == [0, 0]
    assert [answer.num_cached for answer in found] == whole_blocks
    assert_same(computed, together, OTHER_KERNELS_DIGITS)
    assert_same(found, together, OTHER_KERNELS_DIGITS)


def test_place_in_the_step_and_a_second_time_do_not_matter(
    sparse: tuple[str, list[Answer]],
) -> None:
    name, together = sparse
    with Engine(name, enable_prefix_caching=False) as engine:
        alone = [engine.generate([one], NUM_TOKENS)[0] for one in PROMPTS]
        again = engine.generate(PROMPTS, NUM_TOKENS)
        assert_same(again, engine.generate(PROMPTS, NUM_TOKENS), digits=9)
    assert_same(alone, together, OTHER_KERNELS_DIGITS)
    assert_same(again, together, digits=9)


def test_selection_matters(sparse: tuple[str, list[Answer]]) -> None:
    """Else the comparisons above would say nothing about it."""
    name, together = sparse
    everything = generate(models.model(name, index_topk=ALL_SELECTED), PROMPTS)
    assert [one.tokens for one in everything] != [one.tokens for one in together]
    compare_with_transformers(name, everything)


def test_selection_is_known_before_the_rows_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fetches missed rows, or waits for a layer buffer, relies on the order in each layer."""
    seen: list[str] = []

    def recorded(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            seen.append(name)
            return function(*arguments)

        return call

    for name in ("write_index_keys", "selection", "attention"):
        original = getattr(sparse_math, name)
        monkeypatch.setattr(sparse_math, name, recorded(name, original))
    write = cpu_sparse.PagedRows.write
    monkeypatch.setattr(cpu_sparse.PagedRows, "write", recorded("write", write))
    with Engine("deepseek_v32", enable_prefix_caching=False) as engine:
        engine.generate([prompt(3, cpu_sparse.QUERIES_AT_ONCE)], 1)
    layer = ["write_index_keys", "selection", "write", "attention"]
    assert seen == layer * models.NUM_LAYERS


def test_all_selected_is_dense_attention() -> None:
    """deepseek_v3 has the same weights and config, no indexer, and vLLM's own attention."""
    everything = generate(models.model("deepseek_v32", index_topk=ALL_SELECTED), PROMPTS)
    assert_same(everything, generate("deepseek_v3", PROMPTS), OTHER_KERNELS_DIGITS)


def compare_with_transformers(name: str, answers: Sequence[Answer]) -> None:
    """Compare with the model's other implementation, its own tokens given to it."""
    import transformers

    path = models.model(name, index_topk=ALL_SELECTED)
    family = getattr(transformers, f"{models.RECIPES[name].family}ForCausalLM")
    other = family.from_pretrained(path, dtype=torch.float32).eval()
    for asked, answer in zip(PROMPTS, answers, strict=True):
        whole = torch.tensor([[*asked, *answer.tokens]])
        with torch.no_grad():
            said = other(whole).logits[0, len(asked) - 1 : -1].log_softmax(-1)
        assert tuple(said.argmax(-1).tolist()) == answer.tokens
        chosen = said[torch.arange(len(answer.tokens)), torch.tensor(answer.tokens)]
        gap = (chosen - torch.tensor(answer.logprobs)).abs().max()
        assert float(gap) < 10**-OTHER_KERNELS_DIGITS, f"{name}: {float(gap):.1e}"
