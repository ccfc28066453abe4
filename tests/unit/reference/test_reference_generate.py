"""Generation: greedy, the same for every width, with drafts right and wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine_shim.reference.bytes_tokenizer import encode, long_text
from engine_shim.reference.cache import ResidentCache
from engine_shim.reference.config import tiny
from engine_shim.reference.drafts import Drafter
from engine_shim.reference.generate import Decoded, decode, prefill
from engine_shim.reference.model import SparseModel
from tests.unit.reference.caches import PoisonedCache, RecordingCache

pytestmark = pytest.mark.engine

CONFIG = tiny()
PROMPT = encode(long_text(29))
NUM_NEW = 24
ROOM = len(PROMPT) + NUM_NEW


class Oracle:
    """Knows the continuation, and spoils the drafts at chosen places."""

    def __init__(self, tokens: list[int], wrong: set[int]) -> None:
        self._tokens = tokens
        self._wrong = wrong

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        drafts = self._tokens[len(tokens) : len(tokens) + count]
        return [
            (draft + 1) % 256 if len(tokens) + offset in self._wrong else draft
            for offset, draft in enumerate(drafts)
        ]


@pytest.fixture(scope="module")
def model() -> SparseModel:
    return SparseModel(CONFIG)


@pytest.fixture(scope="module")
def greedy(model: SparseModel) -> Decoded:
    """Return the continuation, one token at a time."""
    cache = ResidentCache(CONFIG, ROOM)
    prefill(model, cache, PROMPT, 16)
    return decode(model, cache, PROMPT, NUM_NEW)


@pytest.mark.parametrize(
    ("chunk", "start", "message"),
    [(0, 0, "chunk is 0"), (4, -1, "start is -1"), (4, 29, "start is 29 for 29 tokens")],
)
def test_wrong_prefill_is_refused(model: SparseModel, chunk: int, start: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prefill(model, ResidentCache(CONFIG, ROOM), PROMPT, chunk, start)


@pytest.mark.parametrize(
    ("tokens", "num_new", "width", "message"),
    [
        ([], 1, 1, "tokens is empty"),
        (PROMPT, -1, 1, "num_new is -1"),
        (PROMPT, 1, 0, "width is 0"),
        (PROMPT, 1, 2, "width is 2 without a drafter"),
    ],
)
def test_wrong_decode_is_refused(
    model: SparseModel, tokens: list[int], num_new: int, width: int, message: str
) -> None:
    cache = RecordingCache(CONFIG, ROOM)
    with pytest.raises(ValueError, match=message):
        decode(model, cache, tokens, num_new, width=width)
    assert cache.calls == []


def test_a_sequence_past_the_last_position_is_refused_at_once(model: SparseModel) -> None:
    cache = RecordingCache(CONFIG, 4)
    tokens = [1] * 1025
    with pytest.raises(ValueError, match="tokens is 1025 long; give 1024 or less"):
        prefill(model, cache, tokens, 1)
    with pytest.raises(ValueError, match="tokens and num_new are 1026 together; give 1025 or less"):
        decode(model, cache, tokens[:1024], 2)
    assert cache.calls == []


@pytest.mark.slow
def test_greedy_takes_the_best_logit_each_time(model: SparseModel, greedy: Decoded) -> None:
    known = list(PROMPT)
    for token in greedy.tokens:
        logits = model.forward(torch.tensor(known), 0, ResidentCache(CONFIG, ROOM))
        assert int(logits.argmax()) == token
        known.append(token)
    assert (greedy.num_steps, greedy.num_accepted, greedy.num_rejected) == (NUM_NEW, 0, 0)
    assert len(set(greedy.tokens)) > NUM_NEW // 2, "a continuation that repeats shows little"


@pytest.mark.parametrize("chunk", [1, 7, 16, 29, 100])
def test_prefill_chunks_do_not_change_the_result(
    model: SparseModel, greedy: Decoded, chunk: int
) -> None:
    cache = ResidentCache(CONFIG, ROOM)
    first = int(prefill(model, cache, PROMPT, chunk).argmax())
    assert first == greedy.tokens[0]
    rest = decode(model, cache, [*PROMPT, first], NUM_NEW - 1)
    assert rest.tokens == greedy.tokens[1:]


def test_prefill_goes_on_after_a_prefix_hit(model: SparseModel, greedy: Decoded) -> None:
    cache = RecordingCache(CONFIG, ROOM)
    prefill(model, cache, PROMPT[:16], 16)
    cache.calls.clear()
    logits = prefill(model, cache, PROMPT, 8, start=16)
    assert int(logits.argmax()) == greedy.tokens[0]
    assert cache.calls.count(("write", 0)) == 2


def test_decode_may_start_without_the_last_row(model: SparseModel, greedy: Decoded) -> None:
    cache = ResidentCache(CONFIG, ROOM)
    prefill(model, cache, PROMPT[:-1], 16)
    assert decode(model, cache, PROMPT, NUM_NEW) == greedy


def test_no_new_tokens_is_no_step(model: SparseModel) -> None:
    done = decode(model, ResidentCache(CONFIG, 1), [1], 0)
    assert (done.tokens, done.num_steps) == ([], 0)


@pytest.mark.parametrize("width", [2, 3, 4, 9])
@pytest.mark.parametrize(
    "wrong",
    [set(), {30}, {31, 32, 40}, set(range(ROOM)), set(range(0, ROOM, 2))],
    ids=["none", "one", "some", "all", "half"],
)
def test_width_does_not_change_a_bit(
    model: SparseModel, greedy: Decoded, width: int, wrong: set[int]
) -> None:
    cache = PoisonedCache(CONFIG, ROOM)
    prefill(model, cache, PROMPT, 16)
    drafter: Drafter = Oracle(PROMPT + greedy.tokens, wrong)
    done = decode(model, cache, PROMPT, NUM_NEW, drafter, width)
    assert done.tokens == greedy.tokens
    assert done.logits_digest == greedy.logits_digest
    assert done.num_steps + done.num_accepted == NUM_NEW
    if not wrong:
        assert done.num_rejected == 0
        assert done.num_steps == -(-NUM_NEW // width)
    if wrong == set(range(ROOM)):
        assert done.num_accepted == 0
        assert done.num_steps == NUM_NEW


def test_rejected_drafts_are_voided(model: SparseModel, greedy: Decoded) -> None:
    cache = RecordingCache(CONFIG, ROOM)
    prefill(model, cache, PROMPT, 16)
    cache.calls.clear()
    drafter = Oracle(PROMPT + greedy.tokens, {30})
    done = decode(model, cache, PROMPT, 6, drafter, 4)
    voided = [value for name, value in cache.calls if name == "truncate"]
    # 29 known, drafts for 29, 30 and 31, of which 30 is wrong: rows 0 to 29 stay. Then 31 known,
    # drafts for 31, 32 and 33, all right: nothing is voided.
    assert voided == [30, 34]
    assert (done.num_steps, done.num_accepted, done.num_rejected) == (2, 4, 2)
    assert cache.rows(0).shape[0] == len(PROMPT) + 5


def test_the_last_step_does_not_run_past_the_end(model: SparseModel, greedy: Decoded) -> None:
    cache = ResidentCache(CONFIG, len(PROMPT) + 4)
    prefill(model, cache, PROMPT, 16)
    done = decode(model, cache, PROMPT, 5, Oracle(PROMPT + greedy.tokens, set()), 4)
    assert done.tokens == greedy.tokens[:5]
