"""top_k: refusals first, then every kernel against the reference."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvd_kernels import residency_reference as reference
from kvd_kernels.residency import HotStep, HotTables
from tests.kernels.residency_cases import KERNELS, row_of

Floats = npt.NDArray[np.float32]
SOME = np.zeros((2, 100), np.float32)
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 1000, 4097, 40_000)
SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38]


def top_k(scores: Floats, k: int, kernel: str) -> list[int]:
    """Return what a kernel selects from one row."""
    step = HotStep(1, max(k, 1), scores=scores[None], kernel=kernel)
    count = step.top_k(0, len(scores), k)
    assert step.counts[0] == count
    found: list[int] = row_of(step.selection, 0, count).tolist()
    return found


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "length", "k", "text"),
    [
        (-1, 10, 5, "query is -1 but must be 0 to 1"),
        (2, 10, 5, "query is 2 but must be 0 to 1"),
        (0, 0, 5, "length is 0 but must be 1 to 100"),
        (0, 101, 5, "length is 101 but must be 1 to 100"),
        (0, 1 << 70, 5, "length is 1180591620717411303424 but must be"),
        (0, 10, 0, "k is 0 but must be 1 to 8"),
        (0, 10, 9, "k is 9 but must be 1 to 8"),
    ],
)
def test_arguments_out_of_range(query: int, length: int, k: int, text: str) -> None:
    step = HotStep(2, 8, scores=SOME)
    with pytest.raises(ValueError, match=text):
        step.top_k(query, length, k)
    assert list(step.counts) == [0, 0]


def test_arguments_that_are_no_integers() -> None:
    step = HotStep(2, 8, scores=SOME)
    with pytest.raises(TypeError, match="length must be an int, not float"):
        step.top_k(0, 1.5, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("queries", "k", "text"),
    [
        (0, 8, "queries is 0 but must be 1 to 14"),
        (15, 8, "queries is 15 but must be 1 to 14"),
        (1, 0, "k is 0 but must be 1 to 4096"),
        (1, 4097, "k is 4097 but must be 1 to 4096"),
    ],
)
def test_steps_that_cannot_be(queries: int, k: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        HotStep(queries, k)


@pytest.mark.parametrize(
    "scores",
    [
        np.zeros((1, 100), np.float32),
        np.zeros(200, np.float32),
        np.zeros((2, 100), np.float64),
        np.zeros((2, 100), np.int32),
        np.zeros((2, 0), np.float32),
    ],
    ids=lambda scores: f"{scores.dtype}{list(scores.shape)}",
)
def test_scores_of_another_shape_or_type(scores: Floats) -> None:
    with pytest.raises(ValueError, match=r"scores must be \[2, T\] of float32, or of uint16"):
        HotStep(2, 8, scores=scores)


def test_scores_that_are_not_contiguous() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        HotStep(2, 8, scores=np.zeros((2, 200), np.float32)[:, ::2])


def test_a_step_without_scores_cannot_search() -> None:
    with pytest.raises(ValueError, match="scores is None"):
        HotStep(2, 8).top_k(0, 1, 1)


def test_unknown_kernel() -> None:
    with pytest.raises(ValueError, match=r"kernel is 'sse9' but this CPU runs auto, .*scalar"):
        HotStep(1, 1, kernel="sse9")


# --- against the reference ------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("length", LENGTHS)
def test_smooth_scores(kernel: str, length: int) -> None:
    draw = np.random.default_rng(length)
    scores = draw.standard_normal(length).astype(np.float32)
    for k in (1, 2, length // 3, length - 1, length, length + 1, 4096):
        if 1 <= k <= 4096:
            assert top_k(scores, k, kernel) == reference.top_k(scores, k).tolist()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("values", [[1.0], [0.0, -0.0], SPECIAL, [np.nan], [-np.inf, np.nan]])
def test_ties_go_to_the_lower_position(kernel: str, values: list[float]) -> None:
    draw = np.random.default_rng(3)
    scores = draw.choice(np.array(values, np.float32), 5000)
    for k in (1, 17, 500, 4096):
        assert top_k(scores, k, kernel) == reference.top_k(scores, k).tolist()


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=80, deadline=None)
@given(
    scores=arrays.arrays(
        np.float32,
        st.integers(1, 700),
        elements=st.one_of(st.sampled_from(SPECIAL[2:]), st.floats(-9, 9, width=16)),
    ),
    k=st.integers(1, 800),
    nans=st.integers(0, 5),
)
def test_generated_scores(kernel: str, scores: Floats, k: int, nans: int) -> None:
    scores[-nans:] = np.nan
    assert top_k(scores, k, kernel) == reference.top_k(scores, k).tolist()


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_spike_per_sample_that_is_not_looked_at(kernel: str) -> None:
    scores = np.full(60_000, -5, np.float32)
    scores[np.arange(100) * 599 + 5] = 7
    assert top_k(scores, 100, kernel) == (np.arange(100) * 599 + 5).tolist()
    assert top_k(-scores, 100, kernel) == reference.top_k(-scores, 100).tolist()


@pytest.mark.parametrize("kernel", KERNELS)
def test_bfloat16_is_searched_as_the_float32_it_is(kernel: str) -> None:
    draw = np.random.default_rng(8)
    bits = (draw.standard_normal(9001).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    bits[::97] = 0x7FC0  # NaN
    step = HotStep(1, 700, scores=bits[None], kernel=kernel)
    for length, k in ((9001, 700), (9001, 1), (8999, 64), (5, 3), (33, 32)):
        count = step.top_k(0, length, k)
        found = row_of(step.selection, 0, count).tolist()
        assert found == reference.top_k(reference.from_bfloat16(bits[:length]), k).tolist()


@pytest.mark.parametrize("kernel", KERNELS)
def test_result_never_depends_on_what_was_carried(kernel: str) -> None:
    draw = np.random.default_rng(4)
    tables = HotTables(1, 8)
    scores = np.zeros((1, 20_000), np.float32)
    step = HotStep(1, 300, scores=scores, kernel=kernel)
    for scale, shift in ((1, 0), (1, 0.2), (1, 1e6), (1, -1e6), (0, 3), (1e-30, 0), (1, 0)):
        drawn = draw.standard_normal(20_000) * scale + shift
        scores[0] = drawn.astype(np.float32)
        for length, k in ((20_000, 300), (19_999, 300), (400, 300), (20_000, 3), (301, 300)):
            step.lim(tables, 0, 0, length, k)
            found = row_of(step.selection, 0, step.counts[0]).tolist()
            assert found == reference.top_k(scores[0, :length], k).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_longest_context(kernel: str) -> None:
    draw = np.random.default_rng(5)
    scores = draw.standard_normal(1 << 20).astype(np.float32)
    assert top_k(scores, 4096, kernel) == reference.top_k(scores, 4096).tolist()
