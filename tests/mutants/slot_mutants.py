"""Ways to break the release rule of one slot."""

from __future__ import annotations

from typing import Final

from tests.mutants.patches import Mutant

RELEASE = "kvd.core.release"
HOLDS = "kvd.core.holds"
SLOT = "kvd.core.slot"

MUTANTS: Final = (
    Mutant(
        "the first completion after the computation releases",
        SLOT,
        "    if slot.holds:\n        return slot, tuple(effects)\n",
        "    if any(hold.kind is HoldKind.COMPUTE for hold in slot.holds):\n"
        "        return slot, tuple(effects)\n",
        ("laws", "scripts", "slot machine"),
    ),
    Mutant(
        "the epoch is ignored",
        RELEASE,
        "    if event.ref != slot.ref:\n",
        "    if event.ref.member != slot.ref.member:\n",
        ("laws", "scripts", "slot machine"),
    ),
    Mutant(
        "the incarnation is ignored",
        RELEASE,
        "    if event.ref != slot.ref:\n",
        "    if event.ref.epoch != slot.ref.epoch:\n",
        ("laws", "scripts"),
    ),
    Mutant(
        "a deadline frees a running save",
        RELEASE,
        "        if ask is Ask.REVOKE:\n",
        "        if ask is Ask.FENCE and hold.kind is HoldKind.SAVE:\n"
        "            effects.append(ev.SettleSave(slot.ref, str(hold.owner), False))\n"
        "            continue\n"
        "        if ask is Ask.REVOKE:\n",
        ("laws", "scripts", "slot machine"),
    ),
    Mutant(
        "a deadline frees a claimed read",
        HOLDS,
        "    if hold.phase is Phase.OFFERED:\n",
        "    if hold.kind is HoldKind.READ:\n",
        ("laws", "scripts", "slot machine"),
    ),
    Mutant(
        "reads are not armed when the rows are written",
        RELEASE,
        "    armed += [offered(spec.read, now, timing) for spec in event.reads]\n",
        "",
        ("laws", "scripts", "slot machine"),
    ),
    Mutant(
        "any end of a read lifts any read",
        RELEASE,
        ") -> Outcome:\n"
        "    hold = slot.find(HoldKind.READ, read)\n"
        "    if hold is None:\n"
        '        return slot, (ev.Ignore(slot.ref, "no_such_hold"),)\n'
        "    if hold.phase is Phase.OFFERED:\n",
        ") -> Outcome:\n"
        "    reads = [hold for hold in slot.holds if hold.kind is HoldKind.READ]\n"
        "    hold = next((hold for hold in reads if hold.executor == executor), None)\n"
        "    if hold is None:\n"
        '        return slot, (ev.Ignore(slot.ref, "no_such_hold"),)\n'
        "    if hold.phase is Phase.OFFERED:\n",
        ("laws", "scripts", "slot machine"),
    ),
    Mutant(
        "any process may end a read",
        RELEASE,
        "    if hold.executor != executor:\n",
        "    if not executor:\n",
        ("laws", "scripts"),
    ),
    Mutant(
        "the attempt is ignored",
        SLOT,
        "            if hold.kind is kind and hold.owner == owner:\n",
        "            if hold.kind is kind and hold.owner[:3] == owner[:3]:\n",
        ("laws", "scripts", "slot machine"),
    ),
    Mutant(
        "a fence is asked for once only",
        HOLDS,
        "    return _fencing(hold, now, timing), Ask.FENCE\n",
        "    fenced_before = hold.doubt is not Doubt.SUSPECT\n"
        "    return _fencing(hold, now, timing), None if fenced_before else Ask.FENCE\n",
        ("liveness", "scripts", "slot machine", "simulator"),
    ),
    Mutant(
        "the truth is asked for once only",
        HOLDS,
        "        return replace(hold, asked=hold.asked + 1, ask_at=now + timing.interval), "
        "Ask.TRUTH\n",
        "        return hold, None\n",
        ("liveness", "scripts"),
    ),
    Mutant(
        "reads are redirected when the first save is done",
        RELEASE,
        "    elif saved is Saved.OPEN and not _has_save(holds):\n",
        "    elif saved is Saved.OPEN:\n",
        ("laws", "scripts", "slot machine"),
    ),
    Mutant(
        "a failed save is forgotten when another one ends well",
        RELEASE,
        "        saved = Saved.FAILED\n",
        "        saved = slot.saved\n",
        ("scripts", "slot machine"),
    ),
    Mutant(
        "an answer that nobody asked for is believed",
        RELEASE,
        "    if hold.doubt is Doubt.NONE:\n",
        "    if hold.phase is Phase.OFFERED:\n",
        ("laws", "scripts"),
    ),
    Mutant(
        "a fence that nobody asked for is believed",
        RELEASE,
        "    if hold.doubt < Doubt.FENCING:\n",
        "    if hold.phase is Phase.OFFERED:\n",
        ("laws", "scripts"),
    ),
    Mutant(
        "a grant is repeated while its read is in doubt",
        RELEASE,
        "        if hold.doubt is not Doubt.NONE:\n",
        "        if not event.executor:\n",
        ("laws", "scripts", "slot machine"),
    ),
    Mutant(
        "a read is ended before it was granted",
        RELEASE,
        "    if hold.phase is Phase.OFFERED:\n"
        '        return slot, (ev.Ignore(slot.ref, "not_granted"),)\n'
        "    if hold.executor != executor:\n",
        "    if hold.phase is not Phase.OFFERED and hold.executor != executor:\n",
        ("laws", "scripts"),
    ),
    Mutant(
        "a death lifts what other processes execute",
        RELEASE,
        "        hold for hold in slot.holds if hold.executor == executor "
        "and hold.phase is Phase.RUNNING\n",
        "        hold for hold in slot.holds if hold.phase is Phase.RUNNING\n",
        ("laws", "scripts", "slot machine"),
    ),
    Mutant(
        "rows of a poisoned tenancy count as good",
        RELEASE,
        "    settled = ev.SettleSave(slot.ref, saver, ok and not slot.poisoned)\n",
        "    settled = ev.SettleSave(slot.ref, saver, ok)\n",
        ("laws", "scripts", "slot machine"),
    ),
)
