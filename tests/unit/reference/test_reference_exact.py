"""What does not change a bit: chunking, threads, cache layout, and what stands in padding."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine_shim.reference.bytes_tokenizer import encode, long_text
from engine_shim.reference.cache import KvCache, ResidentCache
from engine_shim.reference.config import demo, tiny
from engine_shim.reference.model import SparseModel
from engine_shim.reference.threads import configure_threads
from tests.unit.reference.caches import BlockCache, PoisonedCache, RecordingCache

pytestmark = pytest.mark.engine

CONFIG = tiny()
NUM_TOKENS = 75
TOKENS = torch.tensor(encode(long_text(NUM_TOKENS)))


def _logits(
    model: SparseModel, cache: KvCache, chunks: list[int], tokens: Tensor = TOKENS
) -> Tensor:
    """Return the logits of all positions, computed in chunks of the given sizes."""
    parts, start = [], 0
    for size in chunks:
        parts.append(model.forward(tokens[start : start + size], start, cache, all_positions=True))
        start += size
    return torch.cat(parts)


@pytest.fixture(scope="module")
def model() -> SparseModel:
    return SparseModel(CONFIG)


@pytest.fixture(scope="module")
def whole(model: SparseModel) -> Tensor:
    """Return the logits of all positions, computed at once."""
    return _logits(model, ResidentCache(CONFIG, NUM_TOKENS), [NUM_TOKENS])


@pytest.mark.parametrize(
    ("tokens", "start", "message"),
    [
        (torch.zeros(0, dtype=torch.int64), 0, r"tokens is \[0\]"),
        (torch.zeros(2, 2, dtype=torch.int64), 0, r"tokens is \[2, 2\]"),
        (torch.zeros(2, dtype=torch.int32), 0, "torch.int32; give"),
        (torch.tensor([0, 259]), 0, "tokens go from 0 to 259; give 0 to 258"),
        (torch.tensor([-1, 4]), 0, "tokens go from -1 to 4"),
        (torch.tensor([1]), -1, "positions go from -1 to -1"),
        (torch.tensor([1, 1]), 1023, "positions go from 1023 to 1024; give 0 to 1023"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_written(
    model: SparseModel, tokens: Tensor, start: int, message: str
) -> None:
    cache = RecordingCache(CONFIG, 8)
    with pytest.raises(ValueError, match=message):
        model.forward(tokens, start, cache)
    assert cache.calls == []


def test_threads_must_be_positive() -> None:
    with pytest.raises(ValueError, match="num_threads is 0"):
        configure_threads(0)


@pytest.mark.parametrize(
    "chunks",
    [
        [1] * NUM_TOKENS,
        [1, NUM_TOKENS - 1],
        [7, 8, 9, NUM_TOKENS - 24],
        [15, 1, 1, NUM_TOKENS - 17],
        [31, 2, NUM_TOKENS - 33],
        [NUM_TOKENS - 1, 1],
        [4, 3, 4, 5, NUM_TOKENS - 16],
    ],
    ids=lambda chunks: "+".join(map(str, chunks[:5])),
)
def test_chunking_does_not_change_a_bit(
    model: SparseModel, whole: Tensor, chunks: list[int]
) -> None:
    assert torch.equal(_logits(model, ResidentCache(CONFIG, NUM_TOKENS), chunks), whole)


@pytest.mark.slow
def test_chunking_does_not_change_a_bit_of_the_demo_model() -> None:
    config = replace(demo(), num_layers=4)
    model, count = SparseModel(config), 600
    tokens = torch.tensor(encode(long_text(count)))
    at_once = _logits(model, ResidentCache(config, count), [count], tokens)
    chunks = [256, 1, 3, 100, 4, 236]
    assert torch.equal(_logits(model, ResidentCache(config, count), chunks, tokens), at_once)


def test_rows_do_not_depend_on_chunking(model: SparseModel) -> None:
    first, second = RecordingCache(CONFIG, NUM_TOKENS), RecordingCache(CONFIG, NUM_TOKENS)
    _logits(model, first, [NUM_TOKENS])
    _logits(model, second, [13, NUM_TOKENS - 13])
    for layer in range(CONFIG.num_layers):
        assert torch.equal(first.rows(layer), second.rows(layer))


def test_last_position_alone_has_the_same_logits(model: SparseModel, whole: Tensor) -> None:
    logits = model.forward(TOKENS, 0, ResidentCache(CONFIG, NUM_TOKENS))
    assert logits.shape == (1, CONFIG.vocab)
    assert torch.equal(logits[0], whole[-1])


def test_writing_a_row_again_gives_the_same_bits(model: SparseModel, whole: Tensor) -> None:
    cache = RecordingCache(CONFIG, NUM_TOKENS)
    _logits(model, cache, [NUM_TOKENS])
    before = [cache.rows(layer).clone() for layer in range(CONFIG.num_layers)]
    again = model.forward(TOKENS[-1:], NUM_TOKENS - 1, cache)
    assert torch.equal(again[0], whole[-1])
    for layer, rows in enumerate(before):
        assert torch.equal(cache.rows(layer), rows)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 3e38])
def test_padding_never_leaks(model: SparseModel, num_tokens: int, poison: float) -> None:
    clean, poisoned = ResidentCache(CONFIG, 20), PoisonedCache(CONFIG, 20, poison)
    expected = _logits(model, clean, [num_tokens])
    assert torch.equal(_logits(model, poisoned, [num_tokens]), expected)
    assert poisoned.num_poisoned > 0


@pytest.mark.parametrize("block_tokens", [1, 15, 16, 17])
def test_rows_in_scattered_blocks_give_the_same_bits(
    model: SparseModel, whole: Tensor, block_tokens: int
) -> None:
    blocks = list(range(-(-NUM_TOKENS // block_tokens)))
    cache = BlockCache(CONFIG, block_tokens, [*blocks[1::2], *blocks[0::2]])
    assert torch.equal(_logits(model, cache, [40, NUM_TOKENS - 40]), whole)


def test_later_tokens_do_not_change_earlier_ones(model: SparseModel, whole: Tensor) -> None:
    changed = TOKENS.clone()
    changed[50:] = (changed[50:] + 1) % 256
    logits = _logits(model, ResidentCache(CONFIG, NUM_TOKENS), [NUM_TOKENS], changed)
    assert torch.equal(logits[:50], whole[:50])
    assert not torch.equal(logits[50], whole[50])


def test_one_wrong_row_shows(model: SparseModel) -> None:
    """The model is sensitive: without this, every equality above would say little."""
    cache = RecordingCache(CONFIG, NUM_TOKENS)
    expected = _logits(model, cache, [NUM_TOKENS])[-1]
    layer = CONFIG.num_layers - 1
    used = cache.announced[CONFIG.index_layer_of(layer)][-1]
    for position in used[:-1].tolist():
        saved = cache.rows(layer)[position].clone()
        cache.rows(layer)[position] += 0.5
        logits = model.forward(TOKENS[-1:], NUM_TOKENS - 1, cache)
        assert not torch.equal(logits[0], expected)
        cache.rows(layer)[position] = saved


def test_layers_share_the_selection_of_their_indexer(model: SparseModel) -> None:
    cache = RecordingCache(CONFIG, NUM_TOKENS)
    for start, end in ((0, 40), (40, 43)):
        model.forward(TOKENS[start:end], start, cache)
        for layer in (2, 3):
            assert torch.equal(torch.cat(cache.gathered[layer]), cache.announced[2])
        assert not torch.equal(cache.announced[0], cache.announced[2])


@pytest.mark.parametrize(("start", "count"), [(6, 4), (8, 1), (7, 2)])
def test_calls_come_in_order_and_a_short_step_gathers_once(
    model: SparseModel, start: int, count: int
) -> None:
    cache = RecordingCache(CONFIG, NUM_TOKENS)
    model.forward(TOKENS[:start], 0, cache)
    cache.calls.clear()
    model.forward(TOKENS[start : start + count], start, cache)
    expected = []
    for layer in range(CONFIG.num_layers):
        names = ["begin_layer", "write", "end_write"]
        if layer in CONFIG.index_layers:
            names += ["index_keys", "selected"]
        expected += [(name, layer) for name in (*names, "gather", "end_layer")]
    assert cache.calls == expected


def test_equal_seeds_give_equal_bits_and_others_do_not(whole: Tensor) -> None:
    again = _logits(SparseModel(tiny()), ResidentCache(CONFIG, NUM_TOKENS), [NUM_TOKENS])
    assert torch.equal(again, whole)
    other = _logits(SparseModel(tiny(seed=1)), ResidentCache(CONFIG, NUM_TOKENS), [NUM_TOKENS])
    assert not torch.equal(other, whole)


@pytest.mark.slow
def test_number_of_threads_does_not_change_a_bit(model: SparseModel, whole: Tensor) -> None:
    configure_threads(2)
    try:
        threaded = _logits(model, ResidentCache(CONFIG, NUM_TOKENS), [20])
    finally:
        configure_threads(1)
    assert torch.equal(threaded, whole[:20])


@pytest.mark.slow
def test_the_package_loads_without_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import engine_shim, engine_shim.reference\n"
        "from engine_shim.reference import bytes_tokenizer, drafts, hashing\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
