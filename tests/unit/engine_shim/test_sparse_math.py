"""Arithmetic of sparse attention against plain loops, and what it skips."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_shim.vllm import sparse_math

INFINITY = float("inf")


def seeded(*shape: int) -> torch.Tensor:
    """Return normal values, the same for each shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


# --- what is skipped ------------------------------------------------------------------------------


def test_negative_slot_is_not_written() -> None:
    cache = torch.full((3, 4, 36), 9, dtype=torch.uint8)
    sparse_math.write_index_keys(cache, torch.tensor([-1, -1]), seeded(2, 32))
    assert bool((cache == 9).all())
    sparse_math.write_index_keys(cache, torch.tensor([-1, 5]), seeded(2, 32))
    changed = (cache != 9).any(-1).view(-1).nonzero().flatten()
    assert changed.tolist() == [5]


def test_token_after_the_query_is_never_selected() -> None:
    scores = sparse_math.index_scores(
        seeded(2, 4, 32), seeded(2, 4), seeded(6, 32), torch.tensor([1, 4])
    )
    assert torch.isinf(scores).tolist() == [[False] * 2 + [True] * 4, [False] * 5 + [True]]
    assert sparse_math.selection(scores, 8).tolist() == [[0, 1, *[-1] * 4], [0, 1, 2, 3, 4, -1]]


# --- what is computed -----------------------------------------------------------------------------


def test_row_of_zeros_has_a_scale() -> None:
    values, scale = sparse_math.quantized(torch.zeros(1, 32))
    assert bool((values.float() == 0).all())
    assert float(scale) > 0


def test_scale_is_a_power_of_two_that_fits_the_row() -> None:
    rows = seeded(50, 128) * torch.logspace(-3, 5, 50)[:, None]
    values, scale = sparse_math.quantized(rows)
    assert bool((torch.log2(scale) == torch.log2(scale).round()).all())
    off = (values.float() * scale - rows).abs()
    assert bool((off <= rows.abs() * 2**-4 + scale * 2**-9).all())
    assert bool((rows.abs().amax(-1, keepdim=True) > scale * 448 / 2).all()), "a scale too large"


def test_index_keys_come_back_as_they_were_rounded() -> None:
    cache = torch.zeros(3, 4, 36, dtype=torch.uint8)
    keys = seeded(3, 32)
    slots = torch.tensor([11, 0, 6])
    sparse_math.write_index_keys(cache, slots, keys)
    values, scale = sparse_math.quantized(keys)
    assert torch.equal(sparse_math.read_index_keys(cache, slots), values.float() * scale)


def test_scores_are_the_sum_over_heads_of_what_is_positive() -> None:
    queries, weights, keys = seeded(3, 4, 32), seeded(3, 4), seeded(5, 32)
    scores = sparse_math.index_scores(queries, weights, keys, torch.tensor([4, 4, 4]))
    values, scale = sparse_math.quantized(queries)
    rounded = values.float() * scale
    for t in range(3):
        for s in range(5):
            heads = [float(rounded[t, h] @ keys[s]) for h in range(4)]
            wanted = sum(float(weights[t, h]) * max(0.0, heads[h]) for h in range(4))
            assert float(scores[t, s]) == pytest.approx(wanted, abs=1e-4)


def test_ties_go_to_the_earlier_token() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0, 3.0]])
    assert sparse_math.selection(scores, 3).tolist() == [[0, 1, 4]]


@pytest.mark.parametrize("num_selected", [1, 7, 40])
def test_selection_is_the_best_and_does_not_depend_on_the_chunk(num_selected: int) -> None:
    tokens = 40
    positions = torch.arange(tokens)
    scores = seeded(tokens, tokens).masked_fill(positions > positions[:, None], -INFINITY)
    whole = sparse_math.selection(scores, num_selected)
    for t in range(tokens):
        best = sorted(range(t + 1), key=lambda s: -float(scores[t, s]))[:num_selected]
        assert [s for s in whole[t].tolist() if s >= 0] == sorted(best)
        alone = sparse_math.selection(scores[t : t + 1, : t + 1], num_selected)
        assert torch.equal(alone[0], whole[t, : alone.shape[1]])


def test_slots_follow_the_block_table() -> None:
    table = torch.tensor([7, 2, 5], dtype=torch.int32)
    positions = torch.tensor([[0, 15], [16, 47]])
    assert sparse_math.slots_of(table, positions, 16).tolist() == [[112, 127], [32, 95]]


def test_attention_sees_the_valid_rows_alone() -> None:
    queries, rows = seeded(2, 3, 12), seeded(2, 5, 12)
    valid = torch.tensor([[True, False, True, True, False], [False, True, False, False, False]])
    out = sparse_math.attention(queries, rows, valid, 0.5, 8)
    for t in range(2):
        seen = [k for k in range(5) if bool(valid[t, k])]
        for n in range(3):
            shares = [math.exp(0.5 * float(queries[t, n] @ rows[t, k])) for k in seen]
            wanted = sum(
                share / sum(shares) * rows[t, k, :8] for share, k in zip(shares, seen, strict=True)
            )
            assert torch.allclose(out[t, n], torch.as_tensor(wanted), atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_attention_in_parts_is_that_over_all_rows(data: st.DataObject) -> None:
    """Whatever rows come in which part, and whatever stands in those of others."""
    queries, count, num_parts = (data.draw(st.integers(1, most)) for most in (4, 24, 4))
    torch.manual_seed(data.draw(st.integers(0, 1 << 30)))
    width, latent, scale = 12, 8, data.draw(st.sampled_from([0.1, 1.0, 30.0]))
    valid = torch.rand(queries, count) < 0.7
    valid[:, 0] = True
    q, rows = torch.randn(queries, 3, width), torch.randn(queries, count, width)
    of_part = torch.randint(0, num_parts, (queries, count))

    def parts() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(num_parts):
            mine = valid & (of_part == number)
            some = mine.any(0)  # none at all, at times
            if bool(some.any()):
                others = ~mine[:, some]
                yield rows[:, some].masked_fill(others[..., None], float("nan")), mine[:, some]

    whole = sparse_math.attention(q, rows, valid, scale, latent)
    got = sparse_math.attention_in_parts(q, parts(), scale, latent)
    score = scale * float(torch.einsum("tnr,tkr->tnk", q, rows).abs().max())
    assert torch.allclose(got, whole, rtol=0, atol=(1e-5 + 5e-7 * score) * float(whole.abs().max()))
