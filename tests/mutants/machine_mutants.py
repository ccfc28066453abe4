"""Ways to break the machine: blocks, reads, transfers and members together."""

from __future__ import annotations

from typing import Final

from tests.mutants.patches import Mutant

ARMING = "kvd.core.arming"
BOOKS = "kvd.core.block_books"
LIVES = "kvd.core.block_lives"
INCOMING = "kvd.core.incoming"
MACHINE = "kvd.core.machine"
MEMBERS = "kvd.core.members"
OUTGOING = "kvd.core.outgoing"
SLOT_OPS = "kvd.core.slot_ops"

CAUGHT: Final = ("simulator", "machine by example")

MUTANTS: Final = (
    # Members and their events ---------------------------------------------------------------------
    Mutant(
        "a new kvd begins again at epoch 0",
        MEMBERS,
        "        epoch = max(said.word_epoch, acquired + 1, 0)\n",
        "        epoch = 0\n",
        CAUGHT,
    ),
    Mutant(
        "announced reads are forgotten",
        MEMBERS,
        "    reads = tuple((spec.read, executor_at(spec.peer)) for spec in said.reads)\n",
        "    reads = tuple((spec.read, executor_at(spec.peer)) for spec in said.reads[:0])\n",
        CAUGHT,
    ),
    Mutant(
        "announced saves are forgotten",
        MEMBERS,
        "    slot = announced(ref, said.computing, said.savers, reads, now, m.rules)\n",
        "    slot = announced(ref, said.computing, (), reads, now, m.rules)\n",
        CAUGHT,
    ),
    Mutant(
        "an engine is dropped while members of its earlier life are leaving",
        MEMBERS,
        "        if not any(other.engine == ref.engine for other in m.members):\n",
        "        if not engine.members:\n",
        ("machine by example",),
    ),
    Mutant(
        "events that are sent again are applied again",
        SLOT_OPS,
        "    for item in e.items[first - e.first_no :]:\n",
        "    for item in e.items:\n",
        CAUGHT,
    ),
    Mutant(
        "a refusal is a yes when the event is sent again",
        SLOT_OPS,
        "            member.codes[member.next_no] = code\n",
        "            member.codes[member.next_no - len(e.items)] = code\n",
        CAUGHT,
    ),
    Mutant(
        "a fence that outruns a death leaves the pins of a load",
        SLOT_OPS,
        "        if tenancy is not None and tenancy.load_blocks:\n",
        "        if tenancy is not None and not tenancy.load_blocks:\n",
        CAUGHT,
    ),
    # Blocks ---------------------------------------------------------------------------------------
    Mutant(
        "abort frees a block while a read pins it",
        LIVES,
        "        if self.state[block] != BlockState.POISONED or block in self.pins:\n",
        "        if self.state[block] != BlockState.POISONED:\n",
        CAUGHT,
    ),
    Mutant(
        "the unpin of a request drops the pins of its loads",
        LIVES,
        "        if len(pins) > 1:\n"
        "            self.pins[block] = pins - {pin}\n"
        "            return\n",
        "",
        CAUGHT,
    ),
    Mutant(
        "a span is saved while another rank loads it",
        BOOKS,
        "        copies = (self.span_saves.get(span, {}), self.span_loads.get(span, {}))\n",
        "        copies = (self.span_saves.get(span, {}), {})\n",
        CAUGHT,
    ),
    Mutant(
        "a late commit may name the next owner's block",
        BOOKS,
        "        if fill is None or fill.owner.engine != engine or "
        'request not in ("", fill.owner.request):\n',
        "        if fill is None or fill.owner.engine != engine:\n",
        ("machine by example",),
    ),
    # Reads of this kvd's slots and blocks ---------------------------------------------------------
    Mutant(
        "a redirect does not pin the pool",
        OUTGOING,
        "    for block in blocks:\n        table.pin_span(block, found.layer, read)\n",
        "",
        CAUGHT,
    ),
    Mutant(
        "a redirect offers blocks that have another owner by now",
        BOOKS,
        "        if self.lives[block] != life:\n",
        "        if self.lives[block] < life:\n",
        ("block machine", "blocks by example", "machine by example"),
    ),
    Mutant(
        "a redirect offers a span that a later save writes",
        BOOKS,
        "        return not self.is_saved(block, span) and fill.tokens[span] >= tokens\n",
        "        return True\n",
        CAUGHT,
    ),
    Mutant(
        "a read of the pool is granted again while it is in doubt",
        OUTGOING,
        "    if hold.doubt is not Doubt.NONE:\n        # As for a slot",
        "    if not event.executor:\n        # As for a slot",
        CAUGHT,
    ),
    Mutant(
        "ended transfers use up the limit of open ones",
        ARMING,
        "        running = sum(1 for transfer in m.outgoing.values() if transfer.open)\n",
        "        running = len(m.outgoing)\n",
        CAUGHT,
    ),
    # Transfers that arrive ------------------------------------------------------------------------
    Mutant(
        "a grant of an old claim is accepted",
        INCOMING,
        "known is None or known.claim != e.claim or known.peer != e.peer",
        "known is None or known.peer != e.peer",
        CAUGHT,
    ),
    Mutant(
        "a late grant starts a read that was denied",
        INCOMING,
        "        del transfer.reads[known.read]\n    out",
        "    out",
        CAUGHT,
    ),
    Mutant(
        "a region is dropped under its transfers",
        MACHINE,
        "    incoming.drop_region_transfers(m, e.region, now, out)\n",
        "",
        CAUGHT,
    ),
)
