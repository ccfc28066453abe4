"""kill -9 of engines and kvds in the middle of a hand-off: bounded ends, and the next one works."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine_shim.reference import orders as od
from tests.e2e.pair import BLOCK, CHUNK, ORDER_SECONDS, Pair, a_pair, text, until

pytestmark = [pytest.mark.slow, pytest.mark.engine]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with a_pair() as made:
        yield made


def start_prefill(pair: Pair, request: str, tokens: tuple[int, ...]) -> None:
    """Begin a prompt for D and wait until its first chunk is done."""
    target = pair.expect(request, tokens)
    pair.prefill.send(od.Prefill(request, list(tokens), [target]))
    news = pair.prefill.receive(ORDER_SECONDS)
    assert isinstance(news, od.Progress), news


def end_of(pair: Pair) -> od.News:
    """What the running order of P ends with."""
    while isinstance(news := pair.prefill.receive(ORDER_SECONDS), od.Progress):
        pass
    return news


def test_the_decode_engine_dies(pair: Pair) -> None:
    """Only its transfer ends; the prompt is stored, P goes on, a new engine is served."""
    start_prefill(pair, "dying", text(skip=1))
    pair.decode.kill()
    news = end_of(pair)
    assert isinstance(news, od.Prefilled), news
    assert news.transfers[0].startswith("transfer_failed")
    pair.settled()
    pair.start_decode()
    assert pair.check("after", text(skip=1)).hit_tokens == 899 // BLOCK * BLOCK
    pair.settled()


def test_the_decode_kvd_dies(pair: Pair) -> None:
    """Its reads are fenced by its death; its engine attaches to the next one and goes on."""
    start_prefill(pair, "dying", text(skip=2))
    assert pair.decode_kvd.process is not None
    pair.decode_kvd.process.kill()
    news = end_of(pair)
    assert isinstance(news, od.Prefilled), news
    assert news.transfers[0].startswith("transfer_failed")
    pair.decode_kvd.process.wait()
    pair.decode_kvd.start()
    lost = pair.decode.ask(od.Decode("dying", list(text(skip=2)), 4), ORDER_SECONDS)
    assert isinstance(lost, od.Failed), lost
    pair.check("after", text(skip=2))
    assert pair.decode.process.poll() is None
    pair.settled()


def test_the_prefill_engine_dies(pair: Pair) -> None:
    """The waiting decode engine is told; nothing torn is readable, what was committed is there."""
    tokens = text(skip=3)
    start_prefill(pair, "dying", tokens)
    pair.prefill.kill()
    news = pair.decode.ask(od.Decode("dying", list(tokens), 4), ORDER_SECONDS)
    assert isinstance(news, od.Failed), news
    assert news.code == "transfer_failed"
    pair.settled()
    pair.start_prefill()
    hit = pair.check("after", tokens).hit_tokens
    assert CHUNK <= hit <= 899 // BLOCK * BLOCK
    pair.settled()


def test_the_prefill_kvd_dies(pair: Pair) -> None:
    """Its engine stays up: the request ends with a code, the next one runs after the re-attach."""
    start_prefill(pair, "dying", text(skip=4))
    assert pair.prefill_kvd.process is not None
    pair.prefill_kvd.process.kill()
    pair.prefill_kvd.process.wait()
    pair.prefill_kvd.start()
    news = end_of(pair)
    assert isinstance(news, od.Failed | od.Prefilled), news
    if isinstance(news, od.Failed):
        assert news.code in ("pool_lost", "unreachable", "outcome_unknown"), news
    assert pair.prefill.process.poll() is None
    assert isinstance(pair.decode.ask(od.Drop("dying"), ORDER_SECONDS), od.Figures)
    pair.check("after", text(skip=4))
    pair.settled()


def test_everything_dies_and_nothing_is_left(pair: Pair) -> None:
    """No file, no socket but the lock's directory, no pool memory."""
    start_prefill(pair, "dying", text(skip=5))
    before = shared_memory()
    processes = [pair.prefill.process, pair.decode.process]
    for kvd in (pair.prefill_kvd, pair.decode_kvd):
        assert kvd.process is not None
        processes.append(kvd.process)
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    pool = 64 << 20
    until(lambda: shared_memory() < before - pool // 2, shared_memory)
    pair.prefill_kvd.start()
    pair.decode_kvd.start()
    pair.start_prefill()
    pair.start_decode()
    pair.check("after", text(skip=5))
    pair.settled()


def shared_memory() -> int:
    """Bytes of shared memory on this host."""
    with open("/proc/meminfo", encoding="ascii") as info:
        for line in info:
            if line.startswith("Shmem:"):
                return int(line.split()[1]) << 10
    raise AssertionError("no Shmem in /proc/meminfo")
