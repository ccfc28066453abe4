"""Logs and transitions: one line each, with ids; quiet levels cost nothing."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.core import effects as ef
from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core.copies import GATE_FREE, GATE_QUARANTINED
from kvd.core.errors import InvariantError, LocalError
from kvd.core.holds import HoldKind, Truth
from kvd.core.ids import ReadId, SlotRef
from kvd.core.transfer_types import Offer, Source, SourceKind
from kvd.server.logs import BURST, LogFormat, LogLevel, Logs, capture_library_logs
from kvd.server.transition_log import TransitionLog, ids, log_transitions
from tests.unit.server.fake_node import ref

ROOT = Path(__file__).parents[3]
HELD = SlotRef(ref(), 3, 7)
READ = ReadId("t1", 4, 16, 0)


class Recorder:
    """Logs into a file, and what came out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.time = 100.0
        self.logs: Logs
        self._file: io.TextIOWrapper

    def open(self, level: LogLevel, form: LogFormat = "json") -> Logs:
        self._file = self.path.open("w")
        self.logs = Logs(level, form, self._file, clock=lambda: self.time)
        return self.logs

    def text(self) -> str:
        """Close, and return everything."""
        assert self.logs.close(seconds=30)
        self._file.close()
        return self.path.read_text()

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.text().splitlines()]

    def events(self) -> list[object]:
        return [line["event"] for line in self.lines()]


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path / "log")


# Levels and forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "written"),
    [
        ("error", ["e"]),
        ("warning", ["w", "e"]),
        ("info", ["i", "w", "e"]),
        ("debug", ["d", "i", "w", "e"]),
    ],
)
def test_less_severe_events_are_not_written(
    level: LogLevel, written: list[str], recorder: Recorder
) -> None:
    logs = recorder.open(level)
    logs.debug("d")
    logs.info("i")
    logs.warning("w")
    logs.error("e")
    wanted = [name for name in ("debug", "info", "warning", "error") if logs.wants(name)]
    assert len(wanted) == len(written)
    assert recorder.events() == written


def test_the_level_changes_at_once(recorder: Recorder) -> None:
    logs = recorder.open("error")
    logs.info("before")
    logs.set_level("info")
    logs.info("after")
    assert logs.level == "info"
    assert recorder.events() == ["after"]


def test_json_has_one_document_a_line(recorder: Recorder) -> None:
    logs = recorder.open("info")
    logs.info("slot_released", slot=3, what="two\nlines", path=Path("/x"), text="ü")
    (line,) = recorder.lines()
    assert line["event"] == "slot_released"
    assert line["level"] == "info"
    assert (line["slot"], line["what"], line["path"], line["text"]) == (
        3,
        "two\nlines",
        "/x",
        "ü",
    )
    assert str(line["timestamp"]).endswith("Z")


def test_auto_is_json_where_no_terminal_is(recorder: Recorder) -> None:
    recorder.open("info", "auto").info("x")
    assert recorder.events() == ["x"]


def test_console_is_one_readable_line(recorder: Recorder) -> None:
    recorder.open("info", "console").info("slot_released", slot=3, text="two\nlines")
    text = recorder.text()
    assert len(text.splitlines()) == 1
    assert "[info" in text
    assert "slot_released" in text
    assert "slot=3" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("form", ["json", "console"])
def test_an_exception_is_told_with_its_traceback(form: LogFormat, recorder: Recorder) -> None:
    logs = recorder.open("info", form)
    try:
        raise ValueError("what is wrong")
    except ValueError:
        logs.exception("it_failed", slot=1)
    text = recorder.text()
    assert "ValueError: what is wrong" in text
    assert "test_logs.py" in text


def test_a_flood_of_one_kind_is_limited_and_counted(recorder: Recorder) -> None:
    logs = recorder.open("info")
    for _ in range(BURST + 5):
        logs.limited("info", "request_refused", "pool_full")
    logs.limited("info", "request_refused", "busy")
    recorder.time += 1
    logs.limited("info", "request_refused", "pool_full")
    lines = recorder.lines()
    assert len(lines) == BURST + 2
    assert lines[-1]["suppressed"] == 5
    assert all("suppressed" not in line for line in lines[:-1])


def test_what_libraries_log_comes_out_here(recorder: Recorder) -> None:
    logs = recorder.open("info")
    undo = capture_library_logs(logs)
    logging.getLogger("some.library").info("too quiet")
    logging.getLogger("some.library").error("bad %s", "thing")
    undo()
    logging.getLogger("some.library").addHandler(logging.NullHandler())
    logging.getLogger("some.library").error("after")
    (line,) = recorder.lines()
    assert (line["event"], line["logger"], line["text"], line["level"]) == (
        "library_message",
        "some.library",
        "bad thing",
        "error",
    )


def test_opening_logs_does_not_load_their_library() -> None:
    code = (
        "import sys; from kvd.server.logs import Logs; logs = Logs('info', 'json'); "
        "logs.debug('quiet'); assert logs.close(10); "
        "print(sorted({'structlog', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# Transitions --------------------------------------------------------------------------------------


def step(recorder: Recorder, level: LogLevel, event: ev.Event, *effects: ef.Effect) -> None:
    log_transitions(recorder.open(level), event, effects)


def test_each_slot_event_is_one_debug_line_with_its_ids(recorder: Recorder) -> None:
    save = se.SaveSpec("s", (1,), (16,))
    read = se.ReadSpec(READ, "tcp://d:1", 32)
    items = (se.Acquired(HELD, 4), se.Written(HELD, 4, (save,), (read,)), se.Computed(HELD))
    offer = Offer(READ, 32, Source(HELD, SourceKind.SLOT, ()))
    step(
        recorder,
        "debug",
        ev.SlotsChanged(1, ref(), 0, items),
        ef.SendOffer("tcp://d:1", offer),
        ef.StoreGate(ref(), 3, 8, GATE_FREE),
    )
    lines = recorder.lines()
    assert [line["event"] for line in lines] == [
        "acquired",
        "written",
        "computed",
        "send_offer",
        "slot_released",
    ]
    for line in lines:
        assert (line["engine"], line["member"], line["slot"]) == ("e0", "w0", 3)
    assert [line["epoch"] for line in lines] == [7, 7, 7, 7, 8]
    assert (lines[1]["layer"], lines[3]["transfer"], lines[3]["layer"]) == (4, "t1", 4)


def test_requests_are_named(recorder: Recorder) -> None:
    step(recorder, "debug", ev.Reserved(1, ref(), "req-17", 3))
    (line,) = recorder.lines()
    assert (line["event"], line["request"], line["engine"]) == ("reserved", "req-17", "e0")


def test_time_alone_is_not_told(recorder: Recorder) -> None:
    step(recorder, "debug", ev.Tick())
    assert recorder.lines() == []


@pytest.mark.parametrize(
    ("record", "level", "name"),
    [
        (ef.Refuse(1, LocalError("pool_full", want=1, free=0)), "info", "request_refused"),
        (ef.AskMember(ref(), HELD, HoldKind.SAVE, "s"), "info", "hold_suspect"),
        (ef.FenceMember(ref(), HELD, HoldKind.SAVE, "s"), "info", "fence_asked"),
        (ef.SendQuery("kvd#d", HELD, READ, False), "info", "hold_suspect"),
        (ef.SendQuery("kvd#d", HELD, READ, True), "info", "fence_asked"),
        (ef.SendRevoke("kvd#d", READ, "not_claimed"), "info", "read_revoked"),
        (ef.StoreGate(ref(), 3, 7, GATE_QUARANTINED), "warning", "slot_quarantined"),
        (ef.FormatPool(4096, 10, b"n"), "info", "pool_formatted"),
        (ev.MemberDied(ref()), "info", "member_died"),
        (ev.MemberSilent(ref()), "warning", "member_silent"),
        (ev.ExecutorLost("kvd#d"), "info", "executor_lost"),
        (ev.BlocksPoisoned(1, ref(), (1,)), "warning", "blocks_poisoned"),
        (ev.FenceEnded(HELD, HoldKind.SAVE, "s", True), "info", "fence_worked"),
        (ev.FenceEnded(HELD, HoldKind.SAVE, "s", False), "info", "fence_impossible"),
        (ev.CopyEnded(READ, False, "x"), "warning", "copy_failed"),
        (
            ev.SlotsChanged(1, ref(), 0, (se.SaveEnded(HELD, "s", False),)),
            "warning",
            "save_failed",
        ),
        (ev.SlotsChanged(1, ref(), 0, (se.LoadEnded(HELD, False),)), "warning", "load_failed"),
        (ev.SlotsChanged(1, ref(), 0, (se.Computed(HELD, False),)), "warning", "compute_failed"),
    ],
)
def test_what_an_operator_must_hear_of_is_told_above_debug(
    record: object, level: LogLevel, name: str, recorder: Recorder
) -> None:
    logs = recorder.open("info")
    if isinstance(record, ef.Effect):
        log_transitions(logs, ev.Tick(), (record,))
    else:
        log_transitions(logs, record, ())  # type: ignore[arg-type]
    (line,) = recorder.lines()
    assert (line["event"], line["level"]) == (name, level)


@pytest.mark.parametrize(
    "event",
    [
        ev.Tick(),
        ev.CopyEnded(READ, True),
        ev.SlotsChanged(1, ref(), 0, (se.SaveEnded(HELD, "s", True), se.Computed(HELD))),
        ev.Reserved(1, ref(), "r", 1),
    ],
)
def test_what_goes_well_is_quiet_without_debug(event: ev.Event, recorder: Recorder) -> None:
    step(recorder, "info", event, ef.StoreGate(ref(), 3, 8, GATE_FREE), ef.MarkFilling((1,)))
    assert recorder.lines() == []


def test_a_refusal_says_code_and_sentence(recorder: Recorder) -> None:
    error = LocalError("pool_full", want=5, free=1, evictable=0, total=9)
    step(recorder, "info", ev.Reserved(1, ref(), "r", 5), ef.Refuse(1, error))
    (line,) = recorder.lines()
    assert line["code"] == "pool_full"
    assert line["what"] == "5 blocks asked, 1 free and 0 evictable of 9."


def test_errors_only_switches_transitions_off(recorder: Recorder) -> None:
    log = TransitionLog(recorder.open("error"))
    assert not log.enabled
    log.step(ev.MemberSilent(ref()), ())
    log.invariant(InvariantError(["block 3 is free but in use"], "story"))
    (line,) = recorder.lines()
    assert (line["event"], line["problems"]) == (
        "invariant_failed",
        ["block 3 is free but in use"],
    )


def test_ids_are_found_wherever_a_record_has_them() -> None:
    names: Callable[[object], dict[str, object]] = ids
    assert names(ev.MemberAnswered(ref(), HELD, HoldKind.SAVE, "s", Truth.RUNNING))["slot"] == 3
    assert names(ef.FreeRegion("r")) == {"region": "r"}
    assert names(ev.EndCame("kvd#d", HELD, READ, True)) == {
        "engine": "e0",
        "member": "w0",
        "slot": 3,
        "epoch": 7,
        "transfer": "t1",
        "layer": 4,
        "start": 16,
        "attempt": 0,
        "executor": "kvd#d",
    }
