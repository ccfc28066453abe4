"""Tensor parallelism: ranks agree with each other and with one rank, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from engine_shim.reference.bytes_tokenizer import encode, long_text
from engine_shim.reference.cache import ResidentCache
from engine_shim.reference.collective import (
    CollectiveError,
    GlooCollective,
    SingleProcess,
    tree_sum,
)
from engine_shim.reference.config import tiny
from engine_shim.reference.generate import decode, prefill
from engine_shim.reference.model import SparseModel
from tests.unit.reference.caches import RecordingCache

pytestmark = pytest.mark.engine

CONFIG = tiny()
TOKENS = torch.tensor(encode(long_text(43)))
DEADLINE_S = 60.0
T = TypeVar("T")


@pytest.fixture
def meeting(tmp_path: Path) -> str:
    """Return a place where ranks meet."""
    return f"file://{tmp_path}/meeting"


def _on_ranks(size: int, work: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


@pytest.mark.parametrize(
    ("method", "rank", "size", "timeout_s", "message"),
    [
        ("file:///tmp/x", 0, 3, 1.0, "size is 3; give a power of two"),
        ("file:///tmp/x", 0, 0, 1.0, "size is 0"),
        ("file:///tmp/x", 2, 2, 1.0, "rank is 2; give 0 to 1"),
        ("file:///tmp/x", -1, 2, 1.0, "rank is -1"),
        ("file:///tmp/x", 0, 2, 0.0, "timeout_s is 0.0; give more than 0"),
        ("env://", 0, 2, 1.0, "init_method is 'env://'; give file:///path"),
        ("tcp://127.0.0.1:99", 0, 2, 1.0, "init_method is 'tcp://127.0.0.1:99'"),
        ("file://path", 0, 2, 1.0, "init_method is 'file://path'"),
    ],
)
def test_wrong_argument_is_named(
    method: str, rank: int, size: int, timeout_s: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        GlooCollective(method, rank, size, timeout_s)


@pytest.mark.slow
def test_a_missing_rank_is_an_error_at_the_deadline(meeting: str) -> None:
    with pytest.raises(CollectiveError, match=r"rank 0 of 2 did not meet the others within 0\.3 s"):
        GlooCollective(meeting, 0, 2, 0.3)


@pytest.mark.slow
def test_a_silent_rank_is_an_error_at_the_deadline(meeting: str) -> None:
    ranks = _on_ranks(2, lambda rank: GlooCollective(meeting, rank, 2, 0.5))
    with pytest.raises(CollectiveError, match="rank 0 of 2 lost another rank"):
        ranks[0].all_reduce(torch.ones(3))


def test_a_closed_rank_says_so(meeting: str) -> None:
    alone = GlooCollective(meeting, 0, 1, DEADLINE_S)
    assert alone.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
    alone.close()
    alone.close()
    with pytest.raises(CollectiveError, match="rank 0 of 1 is closed"):
        alone.all_reduce(torch.ones(2))


def test_the_rank_must_be_the_collectives() -> None:
    with pytest.raises(ValueError, match="tp_rank is 1 but the collective has rank 0"):
        SparseModel(CONFIG, 1, SingleProcess())


class _Claimed:
    """A collective of any size, never used."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        raise AssertionError(tensor)


def test_heads_must_divide_among_ranks() -> None:
    with pytest.raises(ValueError, match="num_heads is 4; give a multiple of the 8 ranks"):
        SparseModel(CONFIG, 0, _Claimed(8))


def test_tree_sum_adds_pairwise() -> None:
    # In float32 (1 + 1e8) + (-1e8 + 1) loses both ones; a running sum keeps the last.
    parts = torch.tensor([[1.0], [1e8], [-1e8], [1.0]])
    assert tree_sum(parts).tolist() == [0.0]
    assert tree_sum(parts[:1]).tolist() == [1.0]


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_the_same_sum(meeting: str, size: int) -> None:
    parts = torch.randn(size, 100, generator=torch.Generator().manual_seed(0))

    def work(rank: int) -> Tensor:
        collective = GlooCollective(meeting, rank, size, DEADLINE_S)
        mine = parts[rank].clone()
        total = collective.all_reduce(mine)
        assert torch.equal(mine, parts[rank])
        return total

    for total in _on_ranks(size, work):
        assert torch.equal(total, tree_sum(parts))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_agree_with_one_rank_in_every_bit(meeting: str, size: int) -> None:
    chunks = [(0, 30), (30, 42), (42, 43)]

    def run(model: SparseModel) -> tuple[Tensor, list[Tensor]]:
        cache = RecordingCache(CONFIG, 43)
        logits = [model.forward(TOKENS[a:b], a, cache, all_positions=True) for a, b in chunks]
        return torch.cat(logits), [cache.rows(layer) for layer in range(CONFIG.num_layers)]

    def work(rank: int) -> tuple[Tensor, list[Tensor]]:
        collective = GlooCollective(meeting, rank, size, DEADLINE_S)
        return run(SparseModel(CONFIG, rank, collective))

    expected, expected_rows = run(SparseModel(CONFIG))
    for logits, rows in _on_ranks(size, work):
        assert torch.equal(logits, expected)
        for mine, other in zip(rows, expected_rows, strict=True):
            assert torch.equal(mine, other)


_RANK_SCRIPT = """
import json, sys
from engine_shim.reference.bytes_tokenizer import encode, long_text
from engine_shim.reference.cache import ResidentCache
from engine_shim.reference.collective import GlooCollective
from engine_shim.reference.config import tiny
from engine_shim.reference.generate import decode, prefill
from engine_shim.reference.model import SparseModel
from engine_shim.reference.threads import configure_threads
configure_threads(1)
rank = int(sys.argv[2])
model = SparseModel(tiny(), rank, GlooCollective(sys.argv[1], rank, 2))
prompt = encode(long_text(20))
cache = ResidentCache(tiny(), 40)
prefill(model, cache, prompt, 16)
done = decode(model, cache, prompt, 12)
print(json.dumps([done.tokens, done.logits_digest]))
"""


@pytest.mark.slow
def test_two_processes_generate_what_one_does(meeting: str) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK_SCRIPT, meeting, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = []
    for process in ranks:
        out, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, err
        outputs.append(json.loads(out))
    prompt = encode(long_text(20))
    model, cache = SparseModel(CONFIG), ResidentCache(CONFIG, 40)
    prefill(model, cache, prompt, 16)
    done = decode(model, cache, prompt, 12)
    assert outputs == [[done.tokens, done.logits_digest]] * 2
