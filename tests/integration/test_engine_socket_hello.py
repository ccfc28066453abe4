"""Hellos at a real kvd: what engines must agree on, and descriptions of what cannot be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.wire import messages as msg
from kvd.wire.layout import BlockLayoutSpec, DeviceLayout, Part, ResidentPart, SlotArea
from kvd.wire.slot_items import (
    AcquiredItem,
    ComputedItem,
    LoadEndedItem,
    LoadItem,
    ReadItem,
)
from tests.integration.live_kvd import LiveKvd
from tests.integration.raw_frames import (
    LAYOUT,
    ROW,
    TOKENS,
    Attach,
    attaching,
    digest,
    epochs,
    refusal,
    save_block,
)

OTHER = BlockLayoutSpec("other", "f16", TOKENS, [[Part("main", 2 * ROW)]] * 2)
READ = ReadItem("t", "127.0.0.1:9", 0, TOKENS, [0])
AREA = SlotArea("main", 0, ROW)


@pytest.fixture(scope="module")
def kvd() -> Iterator[LiveKvd]:
    with LiveKvd() as made:
        yield made


@pytest.fixture
def attach(kvd: LiveKvd) -> Iterator[Attach]:
    with attaching(kvd) as attach:
        yield attach


def test_engines_of_one_layout_share_what_is_stored(attach: Attach) -> None:
    one, two = attach("e0", num_slots=3), attach("e1", num_slots=3)
    one.hello(LAYOUT, probe=b"p" * 32)
    two.hello(LAYOUT, probe=b"p" * 32)
    block = save_block(one, "r", 1)
    assert two.lookup("q", digest(1) + digest(2)) == [block]
    one.unpin("r")
    assert two.commit([block], digest(1), [TOKENS]) == []  # said again: it has that key
    assert two.events([AcquiredItem(1, 0, 0, [LoadItem("q", [block], TOKENS)])]) == []
    assert two.events([LoadEndedItem(1, 0, True), ComputedItem(1, 0)]) == []


def test_engines_that_cannot_share(attach: Attach) -> None:
    first = attach("e0")
    first.hello(LAYOUT, probe=b"p" * 32)
    other = attach("e1")
    assert refusal(lambda: other.hello(OTHER)).code == "layout_mismatch"
    assert refusal(lambda: other.hello(LAYOUT, probe=b"q" * 32)).code == "hash_probe_mismatch"
    for protocol in ((2, 9), (0, 0)):
        error = refusal(lambda p=protocol: other.hello(LAYOUT, protocol=p))  # type: ignore[misc]
        assert error.code == "protocol_mismatch"
    other.hello(LAYOUT, probe=b"p" * 32, protocol=(0, 9))
    second = attach("e0", "w1")
    assert refusal(lambda: second.hello(LAYOUT, tp_size=2)).code == "layout_mismatch"
    again = attach("e0", "w")
    assert refusal(lambda: again.hello(LAYOUT)).code == "engine_busy"


def test_tenants_and_models_do_not_see_each_others_blocks(attach: Attach) -> None:
    first = attach("e0", num_slots=3)
    first.hello(LAYOUT)
    save_block(first, "r", 77)
    for name, layout in {
        "e1": BlockLayoutSpec("model", "f16", TOKENS, LAYOUT.layers, tenant="other"),
        "e2": BlockLayoutSpec("model2", "f16", TOKENS, LAYOUT.layers),
        "e3": BlockLayoutSpec("model", "f16", TOKENS, LAYOUT.layers, plan_version=2),
    }.items():
        other = attach(name)
        other.hello(layout)
        assert other.lookup("r", digest(77)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 1},
        {"rank": -2},
        {"tp_size": 1 << 40, "rank": 0},
        {"kv_port": 65_536},
        {"kv_port": 65_535, "dp_rank": 1},
        {"shard": 1},
        {"layout": BlockLayoutSpec("m", "f16", TOKENS, [])},
        {"layout": BlockLayoutSpec("m", "f16", TOKENS, [[]])},
        {"layout": BlockLayoutSpec("m", "f16", TOKENS, [[Part("a", 1), Part("a", 1)]])},
        {"layout": BlockLayoutSpec("m", "f16", TOKENS, [[Part("a", 1)]], num_shards=1 << 62)},
        {"layout": BlockLayoutSpec("m", "f16", TOKENS, [[Part("a", 1)]] * 10_000, num_shards=17)},
        {"layout": BlockLayoutSpec("m", "f16", 1 << 62, [[Part("a", 1 << 62)]])},
        {"device": DeviceLayout(TOKENS, 1, [0, 0], [0, 0], [[AREA]])},
        {"device": DeviceLayout(TOKENS, 1, [0] * 3, [0, 0, 1], [[AREA]])},
        {"device": DeviceLayout(TOKENS, 1, [0] * 3, [0, 0], [[AREA]])},
        {"device": DeviceLayout(TOKENS, 1, [0] * 3, [0] * 3, [[AREA]])},
        {"device": DeviceLayout(1 << 60, 1 << 60, [0] * 3, [0] * 3, [[AREA]])},
        {"resident": [ResidentPart("scale", 4, {0: 0})]},
        {"slots": [msg.SlotAnnounce(3, 0, True, 0)]},
        {"slots": [msg.SlotAnnounce(0, 0, True, 0)] * 2},
        {"slots": [msg.SlotAnnounce(0, 1 << 56, True, 0)]},
        {"slots": [msg.SlotAnnounce(0, 0, True, (1 << 56) - 1)]},
        {"slots": [msg.SlotAnnounce(0, 0, False, 0, True, ["s", "s"])]},
        {"slots": [msg.SlotAnnounce(0, 0, False, 0, True, [], -1, [READ])]},
        {"slots": [msg.SlotAnnounce(s, 0, False, 0, True, [], 1, [READ]) for s in (0, 1)]},
    ],
    ids=lambda change: repr(change)[:70],
)
def test_a_hello_that_cannot_be(kvd: LiveKvd, attach: Attach, change: dict[str, object]) -> None:
    client = attach(num_slots=3)
    fields = {
        "protocol_min": 1, "protocol_max": 1, "is_scheduler": True, "rank": 0, "tp_size": 1,
        "dp_rank": 0, "shard": 0, "contributes": True, "hash_probe": b"", "layout": LAYOUT,
        "device": None,
    }  # fmt: skip
    frame = msg.Hello(*client.head(), **{**fields, **change})  # type: ignore[arg-type]
    assert client.code(frame) in ("frame_malformed", "limit_reached", "slot_unknown",
                                  "reserve_too_large")  # fmt: skip
    status = kvd.status()
    assert (status["engines_total"], status["slots"]["total"]) == (0, 0)
    client.hello(LAYOUT)
    assert epochs(client) == [0, 0, 0]
