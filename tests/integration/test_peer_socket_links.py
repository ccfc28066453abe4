"""Real kvds that hand rows to each other: several on a side, killed, stopped, restarted."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvd.wire import messages as msg
from tests.integration.live_kvd import LiveKvd, until
from tests.integration.raw_frames import RawMember, epochs, refusal
from tests.integration.raw_peers import (
    BLOCK_BYTES,
    QUICK,
    DecodeMember,
    PrefillMember,
    free_port,
    hand_off,
)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture(scope="module")
def producer() -> Iterator[LiveKvd]:
    """A kvd that prefill engines attach to; tests that kill one start their own."""
    with LiveKvd(*QUICK) as made:
        yield made


@pytest.fixture(scope="module")
def consumer() -> Iterator[LiveKvd]:
    with LiveKvd(*QUICK) as made:
        yield made


# Several ------------------------------------------------------------------------------------------


def test_two_decode_engines_behind_one_kvd(
    producer: LiveKvd, consumer: LiveKvd, stack: ExitStack
) -> None:
    """They are one peer at two addresses."""
    prefill = stack.enter_context(PrefillMember(producer))
    decodes = [
        stack.enter_context(DecodeMember(consumer, free_port(), f"d{number}")) for number in (0, 1)
    ]
    for turn in range(3):
        for number, decode in enumerate(decodes):
            hand_off(prefill, decode, f"t-two-{turn}-{number}", slot=number)
    states = {(peer["address"], peer["state"]) for peer in producer.status()["peers"]}
    assert states >= {(f"127.0.0.1:{decode.port}", "ready") for decode in decodes}
    assert producer.sessions()["reader"] == 1
    assert consumer.refused("peer_frames.unauthorized") == 0


def test_two_producers_for_one_decode_engine(
    producer: LiveKvd, consumer: LiveKvd, stack: ExitStack
) -> None:
    other = stack.enter_context(LiveKvd(*QUICK))
    decode = stack.enter_context(DecodeMember(consumer, free_port()))
    prefills = [stack.enter_context(PrefillMember(kvd)) for kvd in (producer, other)]
    for turn in range(3):
        for number, prefill in enumerate(prefills):
            hand_off(prefill, decode, f"t-producers-{turn}-{number}", block=number)
    assert len(consumer.status()["peers"]) == 2
    # One of them dies: the other's rows still come.
    boot_id = other.status()["boot_id"]
    other.stop(signal.SIGKILL)
    prefills[1].close()
    until(lambda: boot_id not in peers(consumer), "the dead producer is dropped")
    hand_off(prefills[0], decode, "t-producers-last")


def test_a_kvd_that_hands_rows_to_itself(consumer: LiveKvd, stack: ExitStack) -> None:
    prefill = stack.enter_context(PrefillMember(consumer))
    decode = stack.enter_context(DecodeMember(consumer, free_port()))
    for turn in range(2):
        hand_off(prefill, decode, f"t-self-{turn}")


def peers(kvd: LiveKvd) -> set[str]:
    """Boot ids of the kvds that it has links to."""
    return {peer["boot_id"] for peer in kvd.status()["peers"]}


# Restarts -----------------------------------------------------------------------------------------


def test_a_decode_kvd_that_is_killed_and_comes_back(producer: LiveKvd, stack: ExitStack) -> None:
    """On the same port and with the same engine: the next request works."""
    port = free_port()
    consumer = stack.enter_context(LiveKvd(*QUICK))
    prefill = stack.enter_context(PrefillMember(producer))
    lost = DecodeMember(consumer, port)
    hand_off(prefill, lost, "t-d-0")
    before = epochs(prefill)
    lost.expect("t-d-lost")
    boot_id = consumer.status()["boot_id"]
    consumer.stop(signal.SIGKILL)
    prefill.offer("t-d-lost", port, b"x" * BLOCK_BYTES, slot=1)
    lost.close()
    consumer.start()
    decode = stack.enter_context(DecodeMember(consumer, port))
    hand_off(prefill, decode, "t-d-1")
    decode.expect("t-d-lost")  # asked for anew: the offer is still there, or it is told
    assert decode.arrived("t-d-lost") == b"x" * BLOCK_BYTES
    until(lambda: epochs(prefill)[1] == before[1] + 1, "the slot of the lost transfer")
    readers = producer.sessions()["reader"]
    assert readers == len({peer["boot_id"] for peer in producer.status()["peers"]} - {boot_id})


def test_a_prefill_kvd_that_is_killed_and_comes_back(consumer: LiveKvd, stack: ExitStack) -> None:
    producer = stack.enter_context(LiveKvd(*QUICK))
    decode = stack.enter_context(DecodeMember(consumer, free_port()))
    lost = PrefillMember(producer)
    hand_off(lost, decode, "t-p-0")
    boot_id = producer.status()["boot_id"]
    producer.stop(signal.SIGKILL)
    lost.close()
    producer.start()
    prefill = stack.enter_context(PrefillMember(producer))
    hand_off(prefill, decode, "t-p-1")
    assert producer.status()["boot_id"] in peers(consumer)
    assert boot_id not in peers(consumer)


def test_a_producer_that_hangs_delays_no_other(consumer: LiveKvd, stack: ExitStack) -> None:
    """It is stopped after its offer was claimed or granted; the other's rows come meanwhile."""
    hangs, works = (stack.enter_context(LiveKvd(*QUICK)) for _ in range(2))
    decode = stack.enter_context(DecodeMember(consumer, free_port()))
    stuck, prefill = stack.enter_context(PrefillMember(hangs)), PrefillMember(works)
    stack.enter_context(prefill)
    hand_off(stuck, decode, "t-h-0")
    decode.expect("t-h-stuck", block=7)
    stuck.offer("t-h-stuck", decode.port, b"y" * BLOCK_BYTES)
    hangs.pause()
    try:
        for turn in range(5):
            hand_off(prefill, decode, f"t-h-{turn + 1}")
    finally:
        hangs.resume()
    assert decode.arrived("t-h-stuck", block=7) == b"y" * BLOCK_BYTES


# Ports --------------------------------------------------------------------------------------------


def test_a_port_that_somebody_else_has(consumer: LiveKvd, stack: ExitStack) -> None:
    """The hello is refused and nothing of it stays; once the port is free it succeeds."""
    taken = stack.enter_context(socket.socket())
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    member = stack.enter_context(RawMember(consumer.runtime_dir, "e"))
    for _ in range(3):
        error = refusal(lambda: member.hello(None, kv_port=port))
        assert (error.code, error.context["port"]) == ("port_taken", str(port))
    assert consumer.status()["engines_total"] == 0
    assert member.code(msg.Lookup(*member.head(), "r", b"")) == "engine_unknown"
    taken.close()
    member.hello(None, kv_port=port)
    with socket.create_connection(("127.0.0.1", port)):
        pass


def test_the_next_life_of_a_rank_gets_its_port_at_once(
    producer: LiveKvd, consumer: LiveKvd, stack: ExitStack
) -> None:
    port = free_port()
    prefill = stack.enter_context(PrefillMember(producer))
    for life in range(5):
        with DecodeMember(consumer, port) as decode:
            hand_off(prefill, decode, f"t-life-{life}")


def test_a_rank_that_moves_to_another_port(
    producer: LiveKvd, consumer: LiveKvd, stack: ExitStack
) -> None:
    prefill = stack.enter_context(PrefillMember(producer))
    decode = stack.enter_context(DecodeMember(consumer, free_port()))
    hand_off(prefill, decode, "t-move-0")
    taken = stack.enter_context(socket.socket())
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    with pytest.raises(RuntimeError, match="port_taken"):
        decode.hello(None, kv_port=taken.getsockname()[1])
    hand_off(prefill, decode, "t-move-1")
    decode.port = free_port()
    decode.hello(None, kv_port=decode.port)
    hand_off(prefill, decode, "t-move-2")
