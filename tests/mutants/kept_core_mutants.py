"""Ways to break what kvd keeps for the steps of its members."""

from __future__ import annotations

from typing import Final

from tests.mutants.patches import Mutant

BLOCKS: Final = "kvd.core.blocks"
BOOKS: Final = "kvd.core.block_books"
COPIES: Final = "kvd.core.copies"
MEMBERS: Final = "kvd.core.members"
SLOT_OPS: Final = "kvd.core.slot_ops"
STEPS: Final = "kvd.core.steps"

CAUGHT: Final = ("kept steps by example",)
EVERYWHERE: Final = (*CAUGHT, "block machine", "simulator")
BY_CHANCE: Final = (*CAUGHT, "simulator")

MUTANTS: Final = (
    Mutant(
        "a step does not keep its targets",
        BLOCKS,
        "        self.saving.update(targets)\n        self._pin_taken(sources, step)\n",
        "        self._pin_taken(sources, step)\n",
        EVERYWHERE,
    ),
    Mutant(
        "a step does not pin its sources",
        BLOCKS,
        "        self.saving.update(targets)\n        self._pin_taken(sources, step)\n",
        "        self.saving.update(targets)\n",
        EVERYWHERE,
    ),
    Mutant(
        "a closed step keeps nothing, whatever copies run",
        BLOCKS,
        "        if opened.closed and not opened.copies:\n",
        "        if opened.closed and step in self.steps:\n",
        (*CAUGHT, "block machine"),
    ),
    Mutant(
        "a step is over with its last copy, closed or not",
        BLOCKS,
        "        if opened.closed and not opened.copies:\n",
        "        if not opened.copies:\n",
        EVERYWHERE,
    ),
    Mutant(
        "a step keeps its blocks for ever",
        BLOCKS,
        "            self._leave(opened.targets)\n",
        "",
        EVERYWHERE,
    ),
    Mutant(
        "a step pins its blocks for ever",
        BLOCKS,
        "            self._unpin_taken(opened.sources, step)\n",
        "",
        EVERYWHERE,
    ),
    Mutant(
        "another member saves into targets of a step",
        COPIES,
        "    steps.check_others(m, member, saved=taken)\n",
        "",
        BY_CHANCE,
    ),
    Mutant(
        "another member loads targets of a step",
        COPIES,
        "    steps.check_others(m, member, loaded=load.blocks)\n",
        "",
        BY_CHANCE,
    ),
    Mutant(
        "two members have a step of the same targets",
        STEPS,
        "    check_others(m, member, saved=targets, loaded=sources)\n",
        "",
        BY_CHANCE,
    ),
    Mutant(
        "a step is refused for members of another shard",
        STEPS,
        "(other is not None and other.shard != member.shard)",
        "other is None",
        CAUGHT,
    ),
    Mutant(
        "a read is redirected to targets of a step",
        BOOKS,
        "        if any(block in kept.targets for kept in self.steps.values()):\n",
        "        if block < 0:\n",
        EVERYWHERE,
    ),
    Mutant(
        "a step saves into what is read",
        STEPS,
        "    read = targets.intersection(block for block, _ in table.span_readers)\n",
        "    read = targets.intersection(())\n",
        BY_CHANCE,
    ),
    Mutant(
        "a step saves into what another member loads",
        STEPS,
        '    _check_open(table, member, targets, table.load_blocks, "loaded")\n',
        "",
        BY_CHANCE,
    ),
    Mutant(
        "steps of a dead member keep their blocks for ever",
        MEMBERS,
        "    steps.close_all(m, member)\n",
        "",
        BY_CHANCE,
    ),
    Mutant(
        "the number of a step is accepted twice",
        STEPS,
        "    if event.number <= member.last_step:\n",
        "    if event.number < member.last_step:\n",
        CAUGHT,
    ),
    Mutant(
        "a step may load a span that is being saved",
        STEPS,
        "        if opened.span % num_shards == member.shard\n",
        "        if opened.span < 0\n",
        CAUGHT,
    ),
    Mutant(
        "a step may load what an open step may save",
        STEPS,
        "        if step.member == member.ref and not kept.closed\n",
        "        if step.member == member.ref and kept.closed\n",
        CAUGHT,
    ),
    Mutant(
        "a step may load what has only its first layer",
        BOOKS,
        "        have = fill.tokens[shard :: self.shape.num_shards]\n",
        "        have = fill.tokens[shard : shard + 1]\n",
        CAUGHT,
    ),
    Mutant(
        "a member has any number of steps",
        STEPS,
        "if step.member == member.ref) >= STEPS_MAX:\n",
        "if step.number < 0) >= STEPS_MAX:\n",
        CAUGHT,
    ),
    Mutant(
        "a refused save of a step leaves its targets good",
        SLOT_OPS,
        "        steps.refused(m, member, event, now)\n        return error.code\n",
        "        return error.code\n",
        CAUGHT,
    ),
    Mutant(
        "an ignored save of a step leaves its targets good",
        SLOT_OPS,
        '        if why and why != "already_armed":\n',
        "        if event.layer < 0:\n",
        CAUGHT,
    ),
    Mutant(
        "the end of one request ends the saves of its step",
        BOOKS,
        "        return not dead or (len(dead) < len(blocks) and kept.issuperset(dead))\n",
        "        return not dead\n",
        CAUGHT,
    ),
    Mutant(
        "the end of one request ends the loads of its step",
        COPIES,
        "        is_left = is_wanted and request is None and sources.issuperset(load.blocks)\n",
        "        is_left = False\n",
        CAUGHT,
    ),
    Mutant(
        "a step that was refused is forgotten at once",
        STEPS,
        "        member.refused[event.number] = event\n",
        "",
        CAUGHT,
    ),
    Mutant(
        "a step that was refused uses no number",
        STEPS,
        "    member.last_step = event.number\n    try:\n        _open(m, member, event)\n",
        "    try:\n        _open(m, member, event)\n        member.last_step = event.number\n",
        CAUGHT,
    ),
    Mutant(
        "saves of a step that was refused are taken for kept",
        STEPS,
        "            return replace(event, saves=refused.saves, step=0)\n",
        "            return replace(event, saves=refused.saves)\n",
        BY_CHANCE,
    ),
    Mutant(
        "loads of a step that was refused are taken for kept",
        STEPS,
        "            return replace(event, loads=refused.loads, step=0)\n",
        "            return replace(event, loads=refused.loads)\n",
        BY_CHANCE,
    ),
    Mutant(
        "what a refused step may have saved stays good",
        STEPS,
        "member.steps.get(event.step) or member.refused.get(event.step)\n",
        "member.steps.get(event.step)\n",
        CAUGHT,
    ),
    Mutant(
        "a step that was refused is remembered for ever",
        STEPS,
        "        member.refused.pop(event.number, None)\n",
        "        pass\n",
        CAUGHT,
    ),
    Mutant(
        "any number of refused steps is remembered",
        STEPS,
        "        if len(member.refused) > STEPS_MAX:\n",
        "        if len(member.refused) > 2 * STEPS_MAX:\n",
        CAUGHT,
    ),
)
