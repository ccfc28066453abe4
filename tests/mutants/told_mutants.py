"""Ways to break tenancies that are told in one event: what a member tells, and what kvd does."""

from __future__ import annotations

from typing import Final

from tests.mutants.patches import Mutant

ACQUIRING: Final = "engine_shim.client.acquiring"
ANNOUNCEMENTS: Final = "engine_shim.client.announcements"
BLOCKS: Final = "kvd.core.blocks"
BOOKS: Final = "kvd.core.block_books"
CALLS: Final = "engine_shim.client.step_calls"
DESK: Final = "engine_shim.client.desk"
EVENTS: Final = "engine_shim.client.events"
SLOT_OPS: Final = "kvd.core.slot_ops"
USES: Final = "kvd.core.uses"
USE_EVENTS: Final = "kvd.core.use_events"

CORE: Final = ("whole tenancies by example",)
CLIENT: Final = ("what a client tells",)
STREAM: Final = ("event stream",)

MUTANTS: Final = (
    Mutant(
        "what was sent is added to",
        EVENTS,
        "            entry.is_open = False\n            is_awaited = is_awaited",
        "            is_awaited = is_awaited",
        CLIENT,
    ),
    Mutant(
        "what an announcement tells is added to",
        EVENTS,
        "        for entry in self._entries.values():\n            entry.is_open = False\n",
        "",
        CLIENT,
    ),
    Mutant(
        "an end that failed is overtaken by what follows it",
        ACQUIRING,
        "        self._core.room.notify_all()\n        use.told = None\n",
        "        self._core.room.notify_all()\n",
        CLIENT,
    ),
    Mutant(
        "poison is overtaken by what follows it",
        DESK,
        "            core.books.use_of(tenancy).told = None\n",
        "            core.books.use_of(tenancy)\n",
        CLIENT,
    ),
    Mutant(
        "saves that are named are overtaken by what follows them",
        ANNOUNCEMENTS,
        "                use.told = None\n                sizes = sizes or",
        "                sizes = sizes or",
        CLIENT,
    ),
    Mutant(
        "a damaged load counts as a good one",
        DESK,
        "is_good = self._core, ok and not bad\n",
        "is_good = self._core, ok\n",
        CLIENT,
    ),
    Mutant(
        "a failed computation counts as a good one",
        DESK,
        "            if ok:\n                ticket = self._tell_end(use, COMPUTED",
        "            if True:\n                ticket = self._tell_end(use, COMPUTED",
        CLIENT,
    ),
    Mutant(
        "a failed save counts as a good one",
        DESK,
        "is_good = self._core, ok and not tokens and not sums and saver.isascii()\n",
        "is_good = self._core, not tokens and not sums and saver.isascii()\n",
        CLIENT,
    ),
    Mutant(
        "the counts of a save are not told",
        DESK,
        "is_good = self._core, ok and not tokens and not sums and saver.isascii()\n",
        "is_good = self._core, ok and not sums and saver.isascii()\n",
        CLIENT,
    ),
    Mutant(
        "the checksums of a save are not told",
        DESK,
        "is_good = self._core, ok and not tokens and not sums and saver.isascii()\n",
        "is_good = self._core, ok and not tokens and saver.isascii()\n",
        CLIENT,
    ),
    Mutant(
        "a tenancy is written for the layer that it was acquired for",
        CALLS,
        "            if layer < 0 or item.layer in (-1, layer):\n",
        "            if True:\n",
        CLIENT,
    ),
    Mutant(
        "a step closes before the ends of its copies are told",
        ACQUIRING,
        "        ticket = self._tell(use, did, saver=saver)\n        if closing:\n"
        "            core.post(closing, (PLAIN_BYTES,) * len(closing), is_awaited=False)\n",
        "        if closing:\n"
        "            core.post(closing, (PLAIN_BYTES,) * len(closing), is_awaited=False)\n"
        "        ticket = self._tell(use, did, saver=saver)\n        if closing:\n"
        "            pass\n",
        CLIENT,
    ),
    Mutant(
        "a tenancy is carried out at once in a slot that is held",
        USES,
        "    if slot.holds or slot.ref != ref:\n",
        "    if slot.ref != ref:\n",
        CORE,
    ),
    Mutant(
        "a tenancy of another epoch is carried out at once",
        USES,
        "    if slot.holds or slot.ref != ref:\n",
        "    if slot.holds:\n",
        CORE,
    ),
    Mutant(
        "a tenancy whose save runs is carried out at once",
        USES,
        " | (SAVED if event.saves else 0)\n",
        " | (did & SAVED if event.saves else 0)\n",
        CORE,
    ),
    Mutant(
        "a tenancy whose load runs is carried out at once",
        USES,
        "(LOADED if event.loads else 0)",
        "(did & LOADED if event.loads else 0)",
        CORE,
    ),
    Mutant(
        "what was loaded of poisoned blocks counts",
        USES,
        "    return step if table.is_loadable(table.steps[step.id].sources, span) else None\n",
        "    return step\n",
        CORE,
    ),
    Mutant(
        "an ended request loads at once",
        USES,
        "        if request is not None and request.ended:\n            return None\n",
        "",
        CORE,
    ),
    Mutant(
        "what was saved into poisoned blocks counts",
        USES,
        "    good = table.has_good(targets, targets) and table.is_untouched(targets, span)\n",
        "    good = table.is_untouched(targets, span)\n",
        CORE,
    ),
    Mutant(
        "what others touch is saved at once",
        USES,
        "    good = table.has_good(targets, targets) and table.is_untouched(targets, span)\n",
        "    good = table.has_good(targets, targets)\n",
        CORE,
    ),
    Mutant(
        "another saver's save is carried out at once",
        USES,
        "step.saves[0].saver != event.saver",
        "not event.saver",
        CORE,
    ),
    Mutant(
        "old checksums stay when a span is saved without",
        USES,
        '0 <= event.layer < shape.num_layers or m.settings.checksums != "off":\n',
        "0 <= event.layer < shape.num_layers:\n",
        CORE,
    ),
    Mutant(
        "a release at once does not reach the gate",
        USES,
        "    out.append(StoreGate(member.ref, ref.slot, ref.epoch + 1, GATE_FREE))\n",
        "",
        CORE,
    ),
    Mutant(
        "what is not known is taken for good",
        SLOT_OPS,
        "    if not 0 < event.did <= DID_MAX:\n",
        "    if False:\n",
        CORE,
    ),
    Mutant(
        "only the last of several refusals is told",
        SLOT_OPS,
        '    return next(filter(None, codes), "")\n',
        "    return codes[-1]\n",
        CORE,
    ),
    Mutant(
        "a save that is told ends before it begins",
        USE_EVENTS,
        "    return tuple(found)\n",
        "    return tuple(reversed(found))\n",
        CORE,
    ),
    Mutant(
        "what a step saved is forgotten when another one saves",
        BLOCKS,
        "        if marks is None or marks.step != step:\n            self.settle()\n",
        "        if marks is None or marks.step != step:\n",
        CORE,
    ),
    Mutant(
        "what a step saved undoes what was saved after it",
        BLOCKS,
        ' are valid."""\n        self.settle()\n',
        ' are valid."""\n',
        CORE,
    ),
    Mutant(
        "what a step saved is not there when it is over",
        BLOCKS,
        "            del self.steps[step]\n            self.settle()\n",
        "            del self.steps[step]\n",
        CORE,
    ),
    Mutant(
        "what a step saved cannot be loaded before it is over",
        BOOKS,
        "        self.settle()\n        state, pins, fills, total",
        "        state, pins, fills, total",
        CORE,
    ),
    Mutant(
        "a block counts as whole when less was saved since",
        BLOCKS,
        "            fill.tokens[span], fill.least = count, None\n",
        "            fill.tokens[span] = count\n",
        CORE,
    ),
    Mutant(
        "a block counts as whole when a step has saved less since",
        BOOKS,
        "            fill.least = None\n            for span in marks.spans:\n",
        "            for span in marks.spans:\n",
        CORE,
    ),
    Mutant(
        "what is whole in one shard counts for all",
        BOOKS,
        "least.get(shard, -1) >= want",
        "max(least.values()) >= want",
        CORE,
    ),
    Mutant(
        "what is saved now is loaded as it was before",
        BOOKS,
        "least.get(shard, -1) >= want and block not in written:\n",
        "least.get(shard, -1) >= want:\n",
        CORE,
    ),
    Mutant(
        "a batch with something that is waited for is quiet",
        EVENTS,
        "not is_awaited and first >= self._asked_end\n",
        "first >= self._asked_end\n",
        STREAM,
    ),
    Mutant(
        "a batch that somebody asked for is quiet",
        EVENTS,
        "not is_awaited and first >= self._asked_end\n",
        "not is_awaited\n",
        STREAM,
    ),
    Mutant(
        "a reply answers all that was sent before it",
        EVENTS,
        "            self._acknowledge(range(max(since, self._base), flight.first_no), ())\n",
        "            self._acknowledge(range(self._base, flight.first_no), ())\n",
        STREAM,
    ),
    Mutant(
        "any reply answers all that was sent before it",
        EVENTS,
        "        if 0 <= since < flight.first_no:\n",
        "        if since < flight.first_no:\n",
        STREAM,
    ),
    Mutant(
        "quiet batches keep their place in the window when they are answered",
        EVENTS,
        "                    self._landed(self._flights.pop(number))\n",
        "                    self._flights.pop(number)\n",
        STREAM,
    ),
    Mutant(
        "batches behind one that was answered are taken for answered",
        EVENTS,
        "since <= other.first_no and other.end <= flight.first_no:\n",
        "since <= other.first_no:\n",
        STREAM,
    ),
    Mutant(
        "batches wait for the answer to quiet ones",
        EVENTS,
        "        self._under_way += not is_quiet\n",
        "        self._under_way += 1\n",
        STREAM,
    ),
    Mutant(
        "any number of quiet batches is sent without an answer",
        EVENTS,
        "and self._quiet_under_way < QUIET_MAX:\n",
        "and True:\n",
        STREAM,
    ),
    Mutant(
        "quiet batches have no room any more when all was sent again",
        EVENTS,
        "        self._under_way = self._awaited_under_way = self._quiet_under_way = 0\n"
        "        self._cursor",
        "        self._under_way = self._awaited_under_way = 0\n        self._cursor",
        STREAM,
    ),
)
