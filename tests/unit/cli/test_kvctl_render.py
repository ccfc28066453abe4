"""What people see, compared with files: KVD_TEST_REWRITE=1 writes them anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rich.console import RenderableType

from kvd.cli.layout import to_text
from kvd.cli.render import render, render_errors
from kvd.cli.text import maybe_seconds, percent, safe_json, seconds, size
from kvd.config.load import ConfigRow
from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core.errors import CATALOGUE
from kvd.core.ids import ReadId, SlotRef
from kvd.core.state import Settings
from kvd.core.use_events import DID_MAX, Used
from kvd.server.invariants import InvariantWatch
from kvd.server.models import Model
from kvd.server.models_tables import BlockPage
from kvd.server.node_view import LinkInfo, Phase, SessionInfo
from kvd.server.sliced import run_now
from kvd.server.views import Watch, status
from kvd.server.views_story import config_page, story_page
from kvd.server.views_tables import (
    BlockQuery,
    EngineQuery,
    SlotQuery,
    block_page,
    engine_page,
    slot_page,
)
from kvd.wire.hot_figures import LayerFigures, RequestFigures
from tests.unit.server.fake_node import SECOND, STRIDE, WALL, FakeNode, ref, region

HERE = Path(__file__).parent / "golden"
REWRITE = "KVD_TEST_REWRITE"
OFFLOADS = {
    "offload": "rolling: 6 layers on 4 buffers (layer 0 bound, 3 shared), 256 blocks instead of "
    "170",
    "why": "asked for by the connector",
    "model": "m, 6 layers",
}


def steady() -> Watch:
    """A watch whose clocks stand still, so that a check always takes as long."""
    return Watch(InvariantWatch(lambda: 0, lambda: 0))


def look(node: FakeNode) -> Model:
    return run_now(status(node, steady(), WALL))


def busy_node() -> FakeNode:
    """A node on which a bit of everything happens."""
    node = FakeNode(
        counters={"frames_received": 812, "frames_refused_unauthorized": 2},
        the_regions=[
            region(reason="prefer: pool needs 1 huge pages of 2MiB but 0 are free."),
            region(name="pool-meta", asked=63 << 10, got=64 << 10, populated=64 << 10, nodes=()),
            region(name="region-d0", node="0", nodes=((0, 768 << 10), (1, 256 << 10)), locked=True),
        ],
    )
    who = node.join(ref("prefill-0", "worker0", 0xA1))
    other = node.join(ref("prefill-0", "worker1", 0xA2), rank=1)
    node.fill(who, "req-1", 3)
    (target,) = node.reserve(who, "req-2", 1)
    node.handle(ev.LookedUp(1, who, "req-3", (0).to_bytes(32) + b"x" * 32))
    node.quarantine(who, 3)
    held = node.offer(who, 1, "t1", 32)
    node.handle(ev.ClaimCame("kvd#d0", held, ReadId("t1", 0, 0, 0), 1))
    node.pass_time(7)
    saving = SlotRef(who, 2, 0)
    save = se.SaveSpec("tier", (target,), (16,))
    node.slot_events(who, se.Acquired(saving, 1), se.Written(saving, 1, (save,)))
    node.handle(ev.Renewed(9, who, "nobody"))
    node.time += 4 * SECOND
    node.the_sessions = [
        SessionInfo(
            "member",
            str(who),
            4711,
            1000,
            node.time - 99 * SECOND,
            node.time - SECOND,
            "local",
            OFFLOADS,
        ),
        SessionInfo(
            "member", str(other), 4712, 1000, node.time, node.time, "local", {"offload": "off"}
        ),
    ]
    node.the_stats = {str(who): {"spare_left": 1.0, "steps": 1200.0}}
    node.the_links = [
        LinkInfo("tcp://10.0.0.7:21001", "consumer", "d0" * 16, "up", node.time - SECOND),
        LinkInfo("tcp://10.0.0.8:21001", "consumer", "", "lost", 0, "connection refused"),
    ]
    return node


def fresh_node() -> FakeNode:
    return FakeNode(
        the_phase=Phase("starting", 40, "populates the pool"),
        the_regions=[],
        started_at=WALL - 2.5,
        settings=Settings(pool_bytes=64 << 30),
    )


def stuck_node() -> FakeNode:
    """A read that never ends."""
    node = FakeNode()
    held = node.offer(node.join(), 1, "t1")
    node.handle(ev.ClaimCame("kvd#dead", held, ReadId("t1", 0, 0, 0), 1))
    node.pass_time(3600)
    return node


def broken_node() -> FakeNode:
    node = FakeNode()
    node.join()
    pool = node.state().pool
    assert pool is not None
    pool.blocks.free.pop()
    return node


def configured_node() -> FakeNode:
    return FakeNode(
        rows=[
            ConfigRow("server.runtime_dir", "", "default", False, "Directory."),
            ConfigRow("pool.size", "64GiB", "file /etc/kvd/kvd.toml:12", False, "Memory."),
            ConfigRow("release.save_deadline", "20s", "env KVD_RELEASE_SAVE_DEADLINE", True, "."),
        ]
    )


def decoding_node() -> FakeNode:
    """A decode engine with two indexer layers and two requests."""
    node = FakeNode()
    layers = [LayerFigures(0, 900, 100, 40, 12.5, 0.75), LayerFigures(4, 70, 0, 0)]
    requests = [
        RequestFigures("chatcmpl-17", 30, 800, 90, 40, 25.0, 0.5, layers),
        RequestFigures("[red]evil[/red]", 3, 0, 0, 0),
    ]
    node.hot[str(node.join(ref("decode-0", "worker0")))] = (layers, requests)
    return node


def stepping_node() -> FakeNode:
    """One step loads a block, another saves into one, and a third is over but for its copy."""
    node = FakeNode()
    who, other = node.join(ref("prefill-0")), node.join(ref("prefill-0", "w1"), rank=1)
    (source,) = node.fill(who, "req-1", 1)
    node.handle(ev.LookedUp(1, who, "req-2", source.to_bytes(32)))
    first, second = node.reserve(who, "req-2", 2)
    node.load_in_step(who, 1, "req-2", source)
    node.save_in_step(who, 2, first)
    node.slot_events(who, Used(SlotRef(who, 2, 0), 1, DID_MAX, 1, 2, "s"))
    node.slot_events(who, se.StepClosed(who, 2))
    node.slot_events(
        who, se.StepOpened(who, 3, (), (se.SaveSpec("s", (second,), (16,), ("req-2",)),))
    )
    node.hold(other, 1)
    return node


def contents() -> dict[str, RenderableType]:
    busy, decoding, stepping = busy_node(), decoding_node(), stepping_node()
    return {
        "status_decoding": render(look(decoding)),
        "engines_decoding": render(run_now(engine_page(decoding, EngineQuery()))),
        "engines_stepping": render(run_now(engine_page(stepping, EngineQuery()))),
        "blocks_stepping": render(run_now(block_page(stepping, BlockQuery()))),
        "story_stepping": render(run_now(story_page(stepping, "block1", 10))),
        "status_busy": render(look(busy)),
        "status_starting": render(look(fresh_node())),
        "status_stuck": render(look(stuck_node())),
        "status_broken": render(look(broken_node())),
        "slots": render(run_now(slot_page(busy, SlotQuery(limit=6)))),
        "slots_none": render(run_now(slot_page(fresh_node(), SlotQuery()))),
        "blocks": render(run_now(block_page(busy, BlockQuery(limit=3)))),
        "blocks_none": render(run_now(block_page(busy, BlockQuery(state="poisoned")))),
        "engines": render(run_now(engine_page(busy, EngineQuery()))),
        "engines_none": render(run_now(engine_page(fresh_node(), EngineQuery()))),
        "story": render(run_now(story_page(busy, "slot1", 4))),
        "config": render(config_page(configured_node())),
        "errors": render_errors([CATALOGUE["pool_full"], CATALOGUE["starting"]]),
        "errors_one": render_errors([CATALOGUE["pool_full"]]),
    }


@pytest.mark.parametrize("name", sorted(contents()))
def test_rendering(name: str) -> None:
    text = to_text(contents()[name], 120)
    path = HERE / f"{name}.txt"
    if os.environ.get(REWRITE) == "1":
        path.write_text(text, encoding="utf-8")
        return
    assert text == path.read_text(encoding="utf-8"), f"if this is meant: {REWRITE}=1"


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == set(contents())


@pytest.mark.parametrize("name", sorted(contents()))
def test_narrow_terminals_lose_no_name(name: str) -> None:
    """At 50 columns lines fold, and every word of the wide form is still there."""
    wide = to_text(contents()[name], 4000)
    narrow = to_text(contents()[name], 50)
    assert max(map(len, narrow.splitlines())) <= 50
    letters = [char for char in wide if char.isalnum()]
    assert sorted(letters) == sorted(char for char in narrow if char.isalnum())


def test_long_names_of_engines_fold_beside_what_they_say() -> None:
    node = FakeNode()
    who = node.join(ref("engine-" * 18))
    about = {"offload": "rolling", "k" * 128: "x" * 200}
    node.the_sessions = [SessionInfo("member", str(who), 1, 1, 0, 0, "local", about)]
    for document in (look(node), run_now(engine_page(node, EngineQuery()))):
        wide, narrow = (to_text(render(document), width) for width in (4000, 50))
        assert max(map(len, narrow.splitlines())) <= 50
        letters = [char for char in wide if char.isalnum()]
        assert sorted(letters) == sorted(char for char in narrow if char.isalnum())


def test_color_is_given_only_when_asked_for() -> None:
    content = render(look(busy_node()))
    assert "\x1b" not in to_text(content, 100)
    assert "\x1b" in to_text(content, 100, color=True)


def test_text_of_clients_is_no_markup() -> None:
    node = FakeNode()
    node.reserve(node.join(), "[red]evil[/red] :smile:", 1)
    text = to_text(render(run_now(block_page(node, BlockQuery()))), 200)
    assert "[red]evil[/red] :smile:" in text


@pytest.mark.parametrize("color", [False, True])
def test_text_of_clients_moves_no_cursor(color: bool) -> None:
    node = FakeNode()
    node.reserve(node.join(), "evil\x1b[2J\x9b2J\x7f\r\u202e", 1)
    text = to_text(render(run_now(block_page(node, BlockQuery()))), 200, color)
    assert "evil?[2J?2J??" in text
    controls = {char for char in text if not char.isprintable()}
    assert controls == ({"\n", "\x1b"} if color else {"\n"})


def test_json_for_programs_moves_no_cursor_and_is_the_same_document() -> None:
    node = FakeNode()
    node.reserve(node.join(), "evil\x1b[2J\x9b2J\x7f", 1)
    page = run_now(block_page(node, BlockQuery()))
    text = safe_json(page.model_dump_json(indent=2))
    assert all(char.isprintable() or char == "\n" for char in text)
    assert BlockPage.model_validate_json(text) == page


def test_another_document_is_a_bug() -> None:
    with pytest.raises(KeyError):
        render(Model())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (STRIDE << 20, "4 GiB"),
        (3 << 40, "3 TiB"),
    ],
)
def test_sizes(value: int, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 ms"),
        (0.0406, "41 ms"),
        (3.21, "3.2 s"),
        (60, "1 min 0 s"),
        (3599.9, "59 min 59 s"),
        (7500, "2 h 5 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_times(value: float, text: str) -> None:
    assert seconds(value) == maybe_seconds(value) == text


def test_nothing_is_a_dash() -> None:
    assert maybe_seconds(None) == percent(0, 0) == "-"
    assert percent(1, 8) == "12.5%"
