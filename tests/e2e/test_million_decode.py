"""Decode over a context of 131,072 generated tokens, in a region that kvd made."""

from __future__ import annotations

from bench.million_decode import Case, run_case


def test_long_decode_with_a_hot_buffer_is_the_decode_that_reads_every_row_afresh() -> None:
    case = Case(131_072, 6, slots=4096)
    outcome = run_case(case)
    assert outcome.hot.tokens == outcome.fresh.tokens
    assert outcome.hot.logits_digest == outcome.fresh.logits_digest
    assert len(outcome.hot.tokens) == case.num_new
    figures = outcome.figures
    assert figures["hot_hits"] > figures["hot_misses"] / 2 > 0, "selections overlap"
    assert figures["hot_load_failures"] == 0
    # 132 bytes of index key a token, and one hot buffer, beside five main rows of 1152 bytes.
    rows = case.num_layers * (case.slots * 1152) + case.topk * 1152
    assert 131_072 * 132 + rows <= outcome.device_bytes < 1.01 * (131_072 * 132 + rows)
