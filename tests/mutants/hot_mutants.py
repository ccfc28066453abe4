"""Ways to break the hot buffers of decode."""

from __future__ import annotations

from typing import Final

from tests.mutants.patches import Mutant

RESIDENCY = "engine_shim.hot_residency"
HOT = "engine_shim.hot"
LENDING = "engine_shim.hot_lending"
LOADS = "engine_shim.hot_loads"

MUTANTS: Final = (
    Mutant(
        "the books of a buffer keep the rows of whoever had it before",
        "engine_shim.hot_requests",
        "            one.reset()\n",
        "            pass\n",
        ("hot meter",),
    ),
    Mutant(
        "a victim is still found in the slot it lost",
        RESIDENCY,
        "        self._cache_slots[self._tokens[slot]] = ABSENT\n",
        "",
        ("hot machine",),
    ),
    Mutant(
        "a row that the step uses may be its victim",
        RESIDENCY,
        "            if self._stamps[slot] == self._step:\n",
        "            if slot < 0:\n",
        ("hot machine",),
    ),
    Mutant(
        "books spare nothing that was hit",
        RESIDENCY,
        "            if not self._chances[slot]:\n",
        "            if slot >= 0:\n",
        ("native books",),
    ),
    Mutant(
        "hits are not marked as used",
        RESIDENCY,
        "            else:\n                self._hit(slot)\n        misses",
        "        misses",
        ("hot machine",),
    ),
    Mutant(
        "rows that the step itself writes are missed",
        RESIDENCY,
        "ABSENT if position in self._fresh else self._place(position)",
        "self._place(position)",
        ("hot books",),
    ),
    Mutant(
        "rows that the step writes get no slot",
        RESIDENCY,
        "        for position in reversed(self._fresh):\n",
        "        for position in ():\n",
        ("hot machine",),
    ),
    Mutant(
        "rejected drafts stay in the hot buffer",
        HOT,
        "            books.invalidate_from(num_tokens)\n",
        "            assert books\n",
        ("hot machine",),
    ),
    Mutant(
        "rejected drafts stay written",
        HOT,
        "        request.written.truncate(num_tokens)\n",
        "",
        ("hot machine",),
    ),
    Mutant(
        "rows that were never written are read",
        HOT,
        "            request.require(self.groups[group], group, given, self.options.track_rows)\n",
        "            pass\n",
        ("hot machine",),
    ),
    Mutant(
        "rows are read while they are loaded",
        HOT,
        "            request.loads.end(key)\n",
        "            pass\n",
        ("hot machine",),
    ),
    Mutant(
        "a failed load leaves its rows in the books",
        HOT,
        "            request.books[self.group_of[key]].reset()\n",
        "            assert request.books\n",
        ("hot machine",),
    ),
    Mutant(
        "rows from elsewhere leave the old ones in the hot buffer",
        HOT,
        "            request.books[group].invalidate_from(start)\n",
        "",
        ("hot machine",),
    ),
    Mutant(
        "a buffer is lent while a load into it runs",
        LENDING,
        "        self._parked.append((buffer, tuple(copies)))\n",
        "        self._parked.append((buffer, ()))\n",
        ("hot machine",),
    ),
    Mutant(
        "a stream that computes does not wait for loads",
        LOADS,
        "        if event is not None:\n            stream.wait(event)\n",
        "        assert event is None or stream is not None\n",
        ("hot streams",),
    ),
    Mutant(
        "the scratch tile is filled while a stream reads it",
        HOT,
        "        if after is not None:\n            self._region.wait(after)\n",
        "",
        ("hot streams",),
    ),
    Mutant(
        "the host waits for loads although a stream does",
        HOT,
        "            request.loads.hold(key, stream)\n            return\n",
        "            request.loads.hold(key, stream)\n",
        ("hot streams",),
    ),
)
