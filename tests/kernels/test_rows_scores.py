"""Index scores: what is refused first, then each kernel against the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvd_kernels import rows_reference
from kvd_kernels.rows import BlockTables, HoleError, IndexScorer, row_kernels

KERNELS = row_kernels()
WIDTH = {"float32": 4, "bfloat16": 2, "fp8": 1}
GIB = 1 << 30


class Scores:
    """Keys of two layers in blocks, and both sides over them."""

    def __init__(
        self,
        element: str,
        *,
        kernel: str = "auto",
        tokens: int = 100,
        block_tokens: int = 16,
        heads: int = 3,
        dim: int = 16,
        gap: int = 4,
        seed: int = 1,
    ) -> None:
        draw = np.random.default_rng(seed)
        self.element, self.tokens = element, tokens
        self.row_bytes = dim * WIDTH[element] + (4 if element == "fp8" else 0)
        blocks = -(-tokens // block_tokens)
        num_blocks = 2 * blocks + 1
        self.block_stride = block_tokens * self.row_bytes + gap
        self.layer_stride = num_blocks * self.block_stride
        self.offset = gap
        self.table = draw.permutation(num_blocks)[: 2 * blocks].astype(np.int32).reshape(2, blocks)
        self.marks = np.full((2, 2), tokens, np.int64)
        self.keys = draw.integers(0, 256, gap + 2 * self.layer_stride, np.uint8)
        self._fill(draw, num_blocks * block_tokens, block_tokens, dim)
        self.queries = draw.standard_normal((2, heads, dim)).astype(np.float32)
        self.weights = draw.standard_normal((2, heads)).astype(np.float32)
        self.scores = np.full((2, tokens), 7.0, np.float32)
        self.tables = BlockTables(
            self.table, self.marks, block_tokens=block_tokens, num_blocks=num_blocks
        )
        self.twin = rows_reference.BlockTables(self.table, self.marks, block_tokens, num_blocks)
        self.native = IndexScorer(
            self.tables, self.keys, queries=self.queries, weights=self.weights,
            scores=self.scores, offset=self.offset, layer_stride=self.layer_stride,
            block_stride=self.block_stride, row_bytes=self.row_bytes, element=element,
            kernel=kernel,
        )  # fmt: skip

    def _fill(self, draw: np.random.Generator, rows: int, block_tokens: int, dim: int) -> None:
        """Put numbers where keys are."""
        for layer in range(2):
            for row in range(rows):
                values = draw.standard_normal(dim).astype(np.float32)
                data = values.view(np.uint8)
                if self.element == "bfloat16":
                    data = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
                elif self.element == "fp8":
                    octets = draw.integers(0, 256, dim, np.uint8)
                    octets[octets & 0x7F == 0x7F] = 0x7E
                    scale = np.array([2.0 ** float(draw.integers(-9, 3))], np.float32)
                    data = np.concatenate((octets, scale.view(np.uint8)))
                at = self.offset + layer * self.layer_stride
                at += row // block_tokens * self.block_stride + row % block_tokens * self.row_bytes
                self.keys[at : at + self.row_bytes] = data

    def expected(self, query: int, request: int, layer: int, tokens: int) -> NDArray[np.float32]:
        """What the definition says."""
        keys = rows_reference.index_keys(
            self.twin, self.keys[self.offset + layer * self.layer_stride :], self.block_stride,
            self.row_bytes, self.element, request, tokens,
        )  # fmt: skip
        return rows_reference.index_scores(self.queries[query], self.weights[query], keys)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ((2, 0, 0, 1), IndexError, "query is 2 but must be 0 to 1"),
        ((-1, 0, 0, 1), IndexError, "query is -1"),
        ((0, 2, 0, 1), IndexError, "request is 2"),
        ((0, 0, 2, 1), IndexError, "layer is 2"),
        ((0, 0, 0, 101), ValueError, "tokens is 101 but must be 0 to 100"),
        ((0, 0, 0, -1), ValueError, "tokens is -1"),
        ((0, 1, 1, 41), HoleError, "position 40 of request 1 layer 1 was never written: 40 rows"),
        ((0, 0, 0, 33), IndexError, "position 32 of request 0 is in block -1, which is none of"),
    ],
)
def test_scores_that_cannot_be_are_refused(
    arguments: tuple[int, int, int, int], kind: type[Exception], text: str
) -> None:
    scores = Scores("float32")
    scores.marks[1, 1] = 40
    scores.table[0, 2] = -1
    with pytest.raises(kind, match=text):
        scores.native.score(*arguments)
    with pytest.raises(kind):
        rows_reference.check_scores(scores.twin, scores.scores, *arguments)
    assert (scores.scores == 7).all()
    scores.native.score(1, 1, 1, 40)
    assert (scores.scores[1, 40:] == 7).all()


def test_key_that_nobody_wrote_is_refused_below_the_watermark() -> None:
    """For debugging: rows are tracked one by one."""
    tracked = np.ones((1, 1, 8), np.uint8)
    tracked[0, 0, 6] = 0
    table, marks = np.zeros((1, 2), np.int32), np.full((1, 1), 8, np.int64)
    tables = BlockTables(table, marks, block_tokens=4, num_blocks=1, rows=tracked)
    scores = np.full((1, 8), 7.0, np.float32)
    native = IndexScorer(
        tables, np.zeros((4, 2), np.float32), queries=np.ones((1, 1, 2), np.float32),
        weights=np.ones((1, 1), np.float32), scores=scores, layer_stride=0, block_stride=0,
        row_bytes=8, element="float32",
    )  # fmt: skip
    with pytest.raises(HoleError, match="position 6 of request 0 layer 0 was never written, alth"):
        native.score(0, 0, 0, 7)
    definition = rows_reference.BlockTables(table, marks, 4, 1, tracked)
    with pytest.raises(HoleError, match="position 6"):
        rows_reference.check_scores(definition, scores, 0, 0, 0, 7)
    assert (scores == 7).all()
    native.score(0, 0, 0, 6)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"row_bytes": 63}, "row_bytes is 63 but a key of 16 elements has 64"),
        ({"element": "int8"}, "element is 'int8'"),
        ({"layer_stride": 1 << 40}, "the keys ends at byte"),
        ({"offset": 1 << 62}, "the keys has an offset or a stride"),
        ({"weights": np.zeros((2, 4), np.float32)}, "weights has 4 items in dimension 1"),
        ({"kernel": "warp"}, "kernel 'warp' does not run"),
    ],
)
def test_arguments_that_do_not_fit(changed: dict[str, object], text: str) -> None:
    scores = Scores("float32")
    arguments = {
        "queries": scores.queries, "weights": scores.weights, "scores": scores.scores,
        "layer_stride": scores.layer_stride, "block_stride": scores.block_stride,
        "row_bytes": 64, "element": "float32", **changed,
    }  # fmt: skip
    with pytest.raises(ValueError, match=text):
        IndexScorer(scores.tables, scores.keys, **arguments)  # type: ignore[arg-type]


# --- results --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("element", WIDTH)
def test_any_scores_are_as_defined(element: str, kernel: str) -> None:
    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 150), st.integers(1, 70), st.integers(1, 9), st.integers(1, 40))
    def check(tokens: int, block_tokens: int, heads: int, dim: int) -> None:
        scores = Scores(
            element, kernel=kernel, tokens=max(1, tokens), block_tokens=block_tokens,
            heads=heads, dim=dim, gap=heads,
        )  # fmt: skip
        scores.native.score(1, 1, 1, tokens)
        expected = scores.expected(1, 1, 1, tokens)
        bound = 1e-5 * max(1.0, float(np.abs(expected).max(initial=0)))
        np.testing.assert_allclose(scores.scores[1, :tokens], expected, rtol=1e-5, atol=bound * dim)
        assert (scores.scores[0] == 7).all()

    check()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("element", WIDTH)
def test_a_score_depends_on_its_key_alone(element: str, kernel: str) -> None:
    """Bit for bit: else a selection could change with the length of the context or its blocks."""
    scores = Scores(element, kernel=kernel, tokens=131, dim=24, heads=6)
    scores.native.score(0, 0, 0, 131)
    whole = scores.scores[0].copy()
    for tokens in (1, 2, 5, 63, 64, 65, 130):
        scores.scores[:] = 7
        scores.native.score(0, 0, 0, tokens)
        assert scores.scores[0, :tokens].tobytes() == whole[:tokens].tobytes()


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_fp8_value(kernel: str) -> None:
    """All 256, one element a key: the score of a key is its value, or its negative."""
    keys = np.zeros((256, 5), np.uint8)
    keys[:, 0] = np.arange(256)
    keys[:, 1:] = np.array([0.5], np.float32).view(np.uint8)
    tables = BlockTables(
        np.zeros((1, 1), np.int32), np.full((1, 1), 256, np.int64), block_tokens=256, num_blocks=1
    )
    scores = np.zeros((1, 256), np.float32)
    native = IndexScorer(
        tables, keys, queries=np.array([[[1], [-1]]], np.float32),
        weights=np.array([[1, -1]], np.float32), scores=scores, layer_stride=0, block_stride=0,
        row_bytes=5, element="fp8", kernel=kernel,
    )  # fmt: skip
    native.score(0, 0, 0, 256)
    expected = rows_reference.widen_fp8(keys[:, 0]) * np.float32(0.5)
    np.testing.assert_array_equal(scores[0], expected)


def test_keys_beyond_2_and_4_gib() -> None:
    row, block_tokens, num_blocks = 132, 1024, 40000
    keys = np.zeros(num_blocks * block_tokens * row, np.uint8)  # 5 GiB that nobody touches
    table = np.array([[20000, 39999]], np.int32)
    tables = BlockTables(
        table, np.full((1, 1), 1030, np.int64), block_tokens=block_tokens, num_blocks=num_blocks
    )
    octets = np.concatenate((np.full(128, 0x38, np.uint8), np.ones(1, np.float32).view(np.uint8)))
    for block, at in ((20000, 1023), (39999, 5)):
        start = (block * block_tokens + at) * row
        keys[start : start + row] = octets
    assert 20000 * block_tokens * row > 2 * GIB
    assert 39999 * block_tokens * row > 4 * GIB
    scores = np.zeros((1, 2048), np.float32)
    native = IndexScorer(
        tables, keys, queries=np.ones((1, 1, 128), np.float32),
        weights=np.ones((1, 1), np.float32), scores=scores, layer_stride=0,
        block_stride=block_tokens * row, row_bytes=row, element="fp8",
    )  # fmt: skip
    native.score(0, 0, 0, 1030)
    assert np.flatnonzero(scores[0]).tolist() == [1023, 1029]
    assert scores[0, 1029] == 128


def test_elements_are_widened_as_defined() -> None:
    """The formula of the definition, on values that are known."""
    known = {0x00: 0.0, 0x01: 2.0**-9, 0x08: 2.0**-6, 0x38: 1.0, 0x7E: 448.0, 0xB8: -1.0}
    found = rows_reference.widen_fp8(np.array(list(known), np.uint8))
    assert found.tolist() == list(known.values())
