"""The member's own books: what it announces, what it answers, what it refuses."""

from __future__ import annotations

import threading

import pytest

from engine_shim.client.errors import KvdRefused
from engine_shim.client.slots import TENANCIES_KEPT, SlotBooks, SlotUse, Tenancy
from engine_shim.client.tickets import Ticket
from kvd.wire.gate_layout import STATE_FREE, STATE_HELD, make_word
from kvd.wire.messages import SlotAnnounce
from kvd.wire.slot_items import LoadItem, ReadItem, SaveItem, WrittenItem

READ = ReadItem("t-1", "host:1", 0, 4, [0])


def free(epoch: int) -> int:
    return make_word(epoch, STATE_FREE)


def ticket(code: str | None = "") -> Ticket:
    """An acknowledged ticket, or one that is still open (None)."""
    made = Ticket(threading.Lock(), 1)
    if code is not None:
        made.settle(code)
    return made


def taken(books: SlotBooks, slot: int = 0, epoch: int = 0) -> SlotUse:
    return books.use_of(books.take(slot, free(epoch), 1, 3, ()))


def written(books: SlotBooks, *savers: str) -> SlotUse:
    use = taken(books)
    saves = [SaveItem(saver, [1, 2], [4, 2]) for saver in savers]
    books.check_written(use, saves)
    books.write(use, WrittenItem(0, 0, 3, saves, [READ]), ticket())
    return use


def end(use: SlotUse, code: str | None = "", *, ok: bool = True) -> None:
    use.compute.ended, use.compute.ok = ticket(code), ok


@pytest.mark.parametrize("tenancy", [Tenancy(0, 1, 1), Tenancy(0, 0, 2), Tenancy(5, 0, 1)])
def test_another_tenancy_is_misuse(tenancy: Tenancy) -> None:
    books = SlotBooks(2)
    taken(books)
    with pytest.raises(KvdRefused) as caught:
        books.use_of(tenancy)
    assert caught.value.code == "tenancy_misused"
    assert "not the slot's present tenancy" in str(caught.value)


def test_steps_out_of_order_are_misuse() -> None:
    books = SlotBooks(1)
    use = written(books, "s")
    with pytest.raises(KvdRefused, match="written or computed before"):
        books.check_written(use, [])
    with pytest.raises(KvdRefused, match="no save by 'other' is running"):
        books.save_of(use, "other")
    end(use)
    with pytest.raises(KvdRefused, match="computed before"):
        books.check_computed(use)


def test_computed_while_loads_run_is_refused() -> None:
    books = SlotBooks(1)
    use = books.use_of(books.take(0, free(0), 1, 3, [LoadItem("r", [1], 4)]))
    with pytest.raises(KvdRefused) as caught:
        books.check_computed(use)
    assert caught.value.code == "load_open"


@pytest.mark.parametrize(
    "saves",
    [
        [SaveItem("s", [1], [1]), SaveItem("s", [2], [1])],
        [SaveItem("s", [1, 2], [1])],
        [SaveItem("s", [1, 2, 3], [1, 1, 1], ["r", "r"])],
    ],
)
def test_saves_that_do_not_add_up_are_misuse(saves: list[SaveItem]) -> None:
    books = SlotBooks(1)
    use = taken(books)
    with pytest.raises(KvdRefused) as caught:
        books.check_written(use, saves)
    assert caught.value.code == "tenancy_misused"


@pytest.mark.parametrize("counts", [[4], [4, 3], [5, 2], [4, 2, 1]])
def test_counts_that_do_not_fit_are_misuse(counts: list[int]) -> None:
    books = SlotBooks(1)
    use = written(books, "s")
    with pytest.raises(KvdRefused, match="do not fit the announced"):
        books.check_counts(use, books.save_of(use, "s"), counts)
    books.check_counts(use, books.save_of(use, "s"), [4, 1])
    books.check_counts(use, books.save_of(use, "s"), [])


def test_free_word_of_the_last_tenancy_opens_nothing() -> None:
    books = SlotBooks(1)
    use = taken(books, epoch=4)
    end(use)
    assert not books.may_take(0, free(4))
    assert not books.may_take(0, make_word(5, STATE_HELD))
    assert books.may_take(0, free(5))


def test_slot_is_in_use_until_the_last_copy_has_ended() -> None:
    books = SlotBooks(1)
    assert not books.is_in_use(0)
    use = written(books, "a", "b")
    end(use)
    assert books.is_in_use(0)
    use.saves["a"].ended = ticket()
    assert use.savers == ["b"]
    assert books.num_busy == 1
    use.saves["b"].ended = ticket(None)  # ended here; kvd need not know yet
    assert not books.is_in_use(0)


def truth(books: SlotBooks, kind: str = "save", owner: str = "s", epoch: int = 0) -> str:
    return books.truth(0, epoch, kind, owner)


def test_truth_about_what_never_was() -> None:
    books = SlotBooks(1)
    assert books.truth(7, 0, "save", "s") == "unknown"
    assert truth(books, epoch=0) == "never_started"
    written(books, "s")
    assert truth(books, epoch=1) == "never_started"
    assert truth(books, owner="other") == "never_started"
    assert truth(books, kind="read") == "unknown"


def test_save_that_may_still_be_announced_is_not_denied() -> None:
    books = SlotBooks(1)
    taken(books)
    assert truth(books) == "unknown"


def test_truth_follows_a_save_to_its_acknowledged_end() -> None:
    books = SlotBooks(1)
    use = written(books, "s")
    save = books.save_of(use, "s")
    assert truth(books) == "running"
    save.ended, save.ok = ticket(None), True
    assert truth(books) == "running"  # the event brings more than the answer could
    save.ended = ticket("")
    assert truth(books) == "ended_ok"
    save.ended = ticket("frame_malformed")
    assert truth(books) == "ended_failed"
    save.ended, save.ok = ticket(""), False
    assert truth(books) == "ended_failed"


def test_truth_about_computing() -> None:
    books = SlotBooks(1)
    use = taken(books)
    assert truth(books, "compute", "engine") == "running"
    end(use, ok=False)
    assert truth(books, "compute", "engine") == "ended_failed"
    end(use)
    assert truth(books, "compute", "engine") == "ended_ok"


def test_history_is_bounded_and_then_unknown() -> None:
    books = SlotBooks(1)
    for epoch in range(TENANCIES_KEPT + 1):
        end(taken(books, epoch=epoch))
    assert truth(books, "compute", "engine", epoch=0) == "unknown"
    assert truth(books, "compute", "engine", epoch=1) == "ended_ok"


def said(books: SlotBooks, word: int) -> SlotAnnounce:
    (announced,) = books.announce(lambda slot: word)
    return announced


def test_announcement_of_a_slot_that_was_never_used() -> None:
    assert said(SlotBooks(1), free(0)) == SlotAnnounce(0, 0, True, -1)


def test_announcement_of_a_slot_in_the_middle_of_everything() -> None:
    books = SlotBooks(1)
    use = written(books, "a", "b")
    use.saves["a"].ended = ticket(None)
    expected = SlotAnnounce(0, 0, False, 0, True, ["b"], 3, [READ])
    assert said(books, make_word(0, STATE_HELD)) == expected


def test_reads_are_announced_until_the_word_shows_the_release() -> None:
    books = SlotBooks(1)
    end(written(books))
    assert said(books, make_word(0, STATE_HELD)).reads == [READ]
    assert said(books, free(0)).reads == [READ]
    assert said(books, free(1)).reads == []
