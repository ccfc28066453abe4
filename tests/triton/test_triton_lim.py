"""lim on the device: refusals first, then the kernel against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvd_kernels import residency_reference as reference
from tests.capabilities import need_module
from tests.triton.twins import CPU, assert_same_table, ints, upload

need_module("triton", "python3 .ci/environment.py triton, then use the Python it names")
from kvd_kernels.triton_ops import residency  # noqa: E402

SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38]
NO_WINNER = reference.NO_WINNER


def select(
    scores: torch.Tensor, lengths: list[int], k: int, *, width: int = 0, block: int = 8192
) -> residency.Selection:
    """Run lim over empty tables, a query each."""
    queries, row_tokens = scores.shape
    tables = residency.make_tables(queries, 4, row_tokens, CPU)
    out = residency.make_selection(queries, width or k, CPU)
    table_of = ints(range(queries))
    residency.lim(tables, table_of, scores, ints(lengths), k, out, block=block)
    return out


def best(scores: reference.Floats, k: int) -> list[int]:
    positions: list[int] = reference.top_k(scores, k).tolist()
    return positions


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("k", 0, "k is 0 but must be 1 to 8"),
        ("k", 9, "k is 9 but must be 1 to 8"),
        ("block", 48, "block is 48 but must be a power of two, 16 to 65536"),
        ("block", 8, "block is 8 but"),
        (
            "scores",
            torch.zeros(2, 9, dtype=torch.float64),
            "scores must be .any, any. of float32 or",
        ),
        ("scores", torch.zeros(2, 8)[:, ::2], "scores must be contiguous"),
        ("scores", torch.zeros(2, 33), "the length of a row of scores is 33 but must be 1 to 32"),
        ("scores", torch.zeros(2, 9, device="meta"), "scores is on meta but the rest is on cpu"),
        ("lengths", ints([1]), r"lengths must be \[2\] of int32, not \[1\] of int32"),
        ("lengths", torch.zeros(2, dtype=torch.int64), r"lengths must be \[2\] of int32, not"),
        ("table_of", ints([1, 2, 3]), "table_of must be"),
        ("out", residency.make_selection(3, 8, CPU), r"positions must be \[2, 8\] of int32"),
    ],
)
def test_arguments_that_do_not_fit(name: str, value: object, text: str) -> None:
    tables = residency.make_tables(2, 4, 32, CPU)
    fitting: dict[str, object] = {
        "table_of": ints([0, 1]),
        "scores": torch.zeros(2, 16),
        "lengths": ints([16, 16]),
        "k": 8,
        "out": residency.make_selection(2, 8, CPU),
        "block": 64,
    }
    with pytest.raises(ValueError, match=text):
        residency.lim(tables, **{**fitting, name: value})  # type: ignore[arg-type]
    assert not tables.stamps.any()


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((0, 1, 1), "num_tables is 0 but must be 1 to 1048576"),
        ((1, 0, 1), "slots is 0 but must be 1 to 262144"),
        ((1, (1 << 18) + 1, 1), "slots is 262145 but must be 1 to 262144"),
        ((1, 1, (1 << 20) + 1), "positions_max is 1048577 but must be 1 to 1048576"),
    ],
)
def test_tables_that_cannot_be(sizes: tuple[int, int, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        residency.make_tables(*sizes, CPU)


def test_tables_that_do_not_fit_each_other() -> None:
    tables = residency.make_tables(1, 4, 32, CPU)._replace(stamps=ints([[0] * 5]))
    out = residency.make_selection(1, 1, CPU)
    with pytest.raises(ValueError, match=r"stamps must be \[1, 4\] of int32, not \[1, 5\]"):
        residency.lim(tables, ints([0]), torch.zeros(1, 4), ints([4]), 1, out)


# --- against the definition -----------------------------------------------------------------------


@pytest.mark.parametrize("block", [256, 4096])
def test_lengths_and_ks(block: int) -> None:
    draw = np.random.default_rng(1)
    lengths = [0, 1, 256, 257, 777]
    scores = draw.standard_normal((len(lengths), 777)).astype(np.float32)
    for k in (1, 256, 1000):
        out = select(torch.from_numpy(scores), lengths, k, width=1024, block=block)
        for query, length in enumerate(lengths):
            want = best(scores[query, :length], k)
            count = int(out.counts[query])
            assert out.positions[query, :count].tolist() == want
            assert set(out.positions[query, count:].tolist()) == {-1}
            assert out.winners[query, :count].tolist() == [~position for position in want]
            assert set(out.winners[query, count:].tolist()) == {NO_WINNER}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", [[1.0], [0.0, -0.0], SPECIAL, [np.nan], [-np.inf, np.nan]])
def test_ties_go_to_the_lower_position(values: list[float], dtype: torch.dtype) -> None:
    draw = np.random.default_rng(3)
    scores = torch.from_numpy(draw.choice(np.array(values, np.float32), (1, 5000))).to(dtype)
    for k in (17, 4096):
        out = select(scores, [5000], k)
        assert out.positions[0].tolist() == best(scores[0].float().numpy(), k)


def test_bfloat16_is_searched_as_the_float32_it_is() -> None:
    draw = np.random.default_rng(8)
    scores = torch.from_numpy(draw.standard_normal((2, 9001)).astype(np.float32)).bfloat16()
    out = select(scores, [9001, 8999], 700)
    for query, length in enumerate((9001, 8999)):
        assert out.positions[query].tolist() == best(scores[query, :length].float().numpy(), 700)


def test_longest_context() -> None:
    draw = np.random.default_rng(5)
    scores = draw.standard_normal((1, 1 << 20)).astype(np.float32)
    out = select(torch.from_numpy(scores), [1 << 20], 4096, block=1 << 16)
    assert out.positions[0].tolist() == best(scores[0], 4096)


def test_hits_are_named_by_their_slots_and_are_in_use() -> None:
    draw = np.random.default_rng(6)
    tables = residency.make_tables(3, 40, 500, CPU)
    defined = [reference.Table(40) for _ in range(3)]
    for number, table in enumerate(defined):
        table.select([draw.permutation(500)[:30].astype(np.int32)])
        table.begin_step()
        upload(residency, tables, number, table)
    scores = draw.standard_normal((4, 480)).astype(np.float32)
    out = residency.make_selection(4, 64, CPU)
    table_of, lengths = [2, 0, 2, 1], [480, 100, 33, 479]
    residency.lim(
        tables, ints(table_of), torch.from_numpy(scores), ints(lengths), 64, out, block=128
    )
    for query, (number, length) in enumerate(zip(table_of, lengths, strict=True)):
        positions, winners = defined[number].lim(scores[query, :length], 64)
        assert out.positions[query, : len(positions)].tolist() == positions.tolist()
        assert out.winners[query, : len(positions)].tolist() == winners.tolist()
    for number, table in enumerate(defined):
        assert_same_table(residency, tables, number, table)
