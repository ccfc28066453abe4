"""A prompt's way from a prefill engine through two kvds to a decode engine, real processes all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine_shim.reference import orders as od
from engine_shim.steps import Target
from tests.e2e.pair import (
    BLOCK,
    CHUNK,
    NEW,
    ORDER_SECONDS,
    Pair,
    a_pair,
    resident,
    text,
    the_model,
)
from tests.unit.reference.ties import check_same_but_for_ties

pytestmark = [pytest.mark.slow, pytest.mark.engine]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with a_pair() as made:
        yield made


@pytest.mark.parametrize("width", [1, 4])
def test_tokens_and_logits_equal_the_resident_run(pair: Pair, width: int) -> None:
    pair.check(f"width-{width}", text(skip=width), width=width)
    pair.settled()


def test_overlapped_decode_gives_the_tokens_of_the_resident_run(pair: Pair) -> None:
    tokens = text(skip=11)
    _, decoded = pair.run("overlapped", tokens, width=4, overlapped=True)
    check_same_but_for_ties(the_model(), tokens, resident(tokens)[0], decoded.tokens)
    figures = decoded.figures
    assert figures["hot_hits"] > 0
    assert figures["hot_merged"] >= figures["hot_merged_misses"] >= 0
    pair.settled()


def test_figures_are_of_one_request(pair: Pair) -> None:
    tokens = text(skip=12)
    for name in ("figures-1", "figures-2"):
        figures = pair.run(name, tokens, width=4)[1].figures
        assert figures["hot_hits"] + figures["hot_misses"] + figures["hot_scratch"] == (
            figures["hot_selected"] - figures["hot_merged"]
        )
    assert (
        pair.run("figures-3", tokens, width=4)[1].figures["hot_selected"]
        == (figures["hot_selected"])
    )
    pair.settled()


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1])
def test_prompts_at_the_edges_of_blocks_and_chunks(pair: Pair, length: int) -> None:
    pair.check(f"edge-{length}", text(length, skip=5000 + length))
    pair.settled()


def test_a_shared_prefix_is_found_and_changes_nothing(pair: Pair) -> None:
    first = text(700, skip=10_000)
    second = first[:500] + text(300, skip=20_000)
    assert pair.check("prefix-1", first).hit_tokens == 0
    assert pair.check("prefix-2", second).hit_tokens == 500 // BLOCK * BLOCK
    assert pair.check("prefix-3", first).hit_tokens == 699 // BLOCK * BLOCK
    pair.settled()


def test_a_request_nobody_expected_is_refused_and_the_next_one_runs(pair: Pair) -> None:
    news = pair.decode.ask(od.Decode("nobody", [1, 2, 3], 4), ORDER_SECONDS)
    assert isinstance(news, od.Failed)
    assert news.code == "request_unknown"
    pair.check("after-nobody", text(skip=77))


def test_a_prompt_that_is_too_long_is_refused_and_changes_nothing(pair: Pair) -> None:
    news = pair.prefill.ask(od.Prefill("long", [1] * 5000), ORDER_SECONDS)
    assert isinstance(news, od.Failed)
    assert news.code == "prompt_too_long"
    news = pair.decode.ask(od.Expect("long", 50_000, NEW), ORDER_SECONDS)
    assert isinstance(news, od.Failed)
    assert news.code == "region_full"
    pair.settled()


def test_a_target_that_nobody_reads_ends_with_a_code_and_nothing_else(pair: Pair) -> None:
    """No decode engine listens there: the prompt is stored, its transfer fails in bounded time."""
    tokens = text(300, skip=30_000)
    order = od.Prefill("absent", list(tokens), [Target("no-such-transfer", "127.0.0.1:1")])
    news = pair.prefill.ask(order, ORDER_SECONDS)
    assert isinstance(news, od.Prefilled), news
    assert news.transfers[0].startswith("transfer_failed: not_claimed")
    again = pair.prefill.ask(od.Prefill("absent-2", list(tokens)), ORDER_SECONDS)
    assert isinstance(again, od.Prefilled)
    assert again.hit_tokens == 299 // BLOCK * BLOCK
    pair.settled()


def test_a_dropped_request_frees_its_destination(pair: Pair) -> None:
    pair.expect("dropped", text(600))
    assert isinstance(pair.decode.ask(od.Drop("dropped"), ORDER_SECONDS), od.Figures)
    pair.settled()
    pair.check("after-drop", text(skip=99))


@pytest.mark.parametrize("buffers", [1, 3, 9])
def test_any_number_of_buffers_gives_the_same(buffers: int) -> None:
    with a_pair(buffers=buffers) as made:
        made.check("buffers", text(skip=3))
        made.settled()


def test_rows_read_in_torch_give_the_same_tokens() -> None:
    with a_pair() as made:
        made.decode.close()
        made.start_decode("--reads", "torch")
        tokens = text(skip=5)
        _, decoded = made.run("torch", tokens, width=4)
        check_same_but_for_ties(the_model(), tokens, resident(tokens)[0], decoded.tokens)
        assert decoded.figures["hot_merged_misses"] == 0
        made.settled()


def test_two_ranks_on_both_sides_give_the_same() -> None:
    with a_pair(tp_prefill=2, tp_decode=2) as made:
        made.check("ranks", text(skip=4))
        tokens = text(skip=4)[:700]
        assert made.check("ranks-prefix", tokens, width=4).hit_tokens > 0
        made.settled()
        assert resident(tokens)
