"""The ring of layer buffers: which layer lives in which slot.

For N cache-bearing layers, I independent (bound) ones and B shared buffers for each bucket, the
physical buffers are I + sum(min(B, bucket size)) + spares. The layers of a bucket take its buffers
round robin in layer order; an independent layer has its own.

A *bucket* is the layers whose main parts are equal. Companion parts (indexer keys, scales), which
only some layers have, follow the main part of their layer: a shared buffer has room for the
companions of every layer of its bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvd.plan.layout import slot_bytes
from kvd.wire.layout import Part

PartsOfLayer = tuple[Part, ...]

COMPANIONS: Final = frozenset({"indexer", "scale"})
"""Parts that do not keep layers from sharing a buffer."""


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """One physical buffer.

    bucket: which bucket's layers it can hold.
    parts:  the parts that it has room for.
    layers: the layers that live in it, in layer order; () for a spare.
    bound:  it belongs to one layer for good.
    """

    bucket: int
    parts: PartsOfLayer
    layers: tuple[int, ...]
    bound: bool = False


@dataclass(frozen=True, slots=True)
class RingPlan:
    """All physical buffers of one worker and the layers' places in them.

    layers:     parts of each layer.
    slots:      physical buffers: bound ones, then shared ones, then spares.
    slot_of:    layer -> index into `slots`.
    lookahead:  layer -> how many layers ahead its load may start.
    """

    layers: tuple[PartsOfLayer, ...]
    slots: tuple[SlotPlan, ...]
    slot_of: tuple[int, ...]
    lookahead: tuple[int, ...]
    num_blocks: int
    block_tokens: int
    reuse: bool = True
    why: str = ""
    spares: tuple[int, ...] = field(default=())

    @property
    def num_layers(self) -> int:
        """Cache-bearing layers."""
        return len(self.slot_of)

    def bytes_of(self, slot: int) -> int:
        """Bytes of one physical buffer."""
        return slot_bytes(self.slots[slot].parts, self.num_blocks, self.block_tokens)

    @property
    def device_bytes(self) -> int:
        """Bytes of all physical buffers, spares included."""
        return sum(self.bytes_of(slot) for slot in range(len(self.slots)))

    @property
    def resident_bytes(self) -> int:
        """Bytes that one buffer for each layer would take."""
        return sum(slot_bytes(parts, self.num_blocks, self.block_tokens) for parts in self.layers)

    def rebind(self, bad: int, spare: int) -> RingPlan:
        """Move the layers of a quarantined slot to a spare of the same bucket.

        Raises: ValueError when `spare` is not a free spare of that bucket.
        """
        if spare not in self.spares or self.slots[spare].bucket != self.slots[bad].bucket:
            raise ValueError(f"slot {spare} is no spare for slot {bad}")
        slots = list(self.slots)
        slots[spare] = replace(slots[spare], layers=slots[bad].layers, bound=slots[bad].bound)
        slots[bad] = replace(slots[bad], layers=())
        slot_of = tuple(spare if slot == bad else slot for slot in self.slot_of)
        return replace(
            self,
            slots=tuple(slots),
            slot_of=slot_of,
            spares=tuple(other for other in self.spares if other != spare),
        )

    def spare_for(self, slot: int) -> int | None:
        """A free spare that could take over the layers of `slot`."""
        for spare in self.spares:
            if self.slots[spare].bucket == self.slots[slot].bucket:
                return spare
        return None


def plan_ring(
    layers: Sequence[PartsOfLayer],
    *,
    independent: Sequence[int] | str = (0,),
    num_shared: int = 3,
    num_blocks: int,
    block_tokens: int,
    spare_buffers: int = 1,
    lookahead: int | Sequence[int] = 1,
) -> RingPlan:
    """Plan the ring.

    Args:
        layers: parts of each cache-bearing layer; layers with equal parts can share buffers.
        independent: layers with a buffer of their own; negatives count from the end, "all" turns
            sharing off.
        num_shared: buffers that each bucket shares (2 to 4 are useful).
        num_blocks, block_tokens: rows that every buffer holds.
        spare_buffers: extra buffers for each bucket that shares, for quarantined slots.
        lookahead: layers ahead that a load may start, one number or one for each layer.
    Raises: ValueError that names the argument and its range.
    """
    count = len(layers)
    if count < 1:
        raise ValueError("layers: at least one cache-bearing layer is needed")
    if num_shared < 1:
        raise ValueError(f"num_shared must be at least 1, got {num_shared}")
    if spare_buffers < 0:
        raise ValueError(f"spare_buffers must be at least 0, got {spare_buffers}")
    bound = _independent_layers(independent, count)
    parts = tuple(tuple(layer) for layer in layers)
    keys = tuple(dict.fromkeys(_main_parts(layer) for layer in parts))
    slots: list[SlotPlan] = []
    slot_of = [-1] * count
    for layer in sorted(bound):
        slot_of[layer] = len(slots)
        slots.append(SlotPlan(keys.index(_main_parts(parts[layer])), parts[layer], (layer,), True))
    sharing: list[SlotPlan] = []
    for bucket, key in enumerate(keys):
        rolling = [n for n in range(count) if _main_parts(parts[n]) == key and n not in bound]
        room = _room(parts[n] for n in rolling)
        first, buffers = len(slots), min(num_shared, len(rolling))
        for turn in range(buffers):
            slots.append(SlotPlan(bucket, room, tuple(rolling[turn::buffers])))
        for place, layer in enumerate(rolling):
            slot_of[layer] = first + place % buffers
        if len(rolling) > buffers:
            sharing.append(SlotPlan(bucket, room, ()))
    spares = []
    for spare in sharing:
        for _ in range(spare_buffers):
            spares.append(len(slots))
            slots.append(spare)
    why = "" if sharing else "every layer has a buffer of its own"
    return RingPlan(
        parts,
        tuple(slots),
        tuple(slot_of),
        _lookahead_map(lookahead, count),
        num_blocks,
        block_tokens,
        bool(sharing),
        why,
        tuple(spares),
    )


def tokens_that_fit(num_blocks: int, block_tokens: int) -> int:
    """Tokens that an engine with so many blocks holds at once; block 0 is its null block."""
    return max(0, num_blocks - 1) * block_tokens


def largest_chunk(num_blocks: int, block_tokens: int, step_tokens: int) -> int:
    """The largest chunk of a prompt that one step can compute.

    Args: step_tokens: most tokens that the engine computes in a step.
    """
    return min(step_tokens, tokens_that_fit(num_blocks, block_tokens))


def _main_parts(parts: PartsOfLayer) -> PartsOfLayer:
    return tuple(part for part in parts if part.name not in COMPANIONS)


def _room(layers: Iterable[PartsOfLayer]) -> PartsOfLayer:
    """The parts that a buffer for any of these layers must have room for."""
    room: dict[str, Part] = {}
    for parts in layers:
        for part in parts:
            if room.setdefault(part.name, part) != part:
                raise ValueError(f"part {part.name} has rows of different sizes in one bucket")
    return tuple(room.values())


def _independent_layers(independent: Sequence[int] | str, count: int) -> set[int]:
    if isinstance(independent, str):
        if independent != "all":
            raise ValueError(f'independent must be a list of layers or "all", got {independent!r}')
        return set(range(count))
    bound = set()
    for layer in independent:
        if not -count <= layer < count:
            raise ValueError(f"independent layer {layer} is outside [-{count}, {count - 1}]")
        bound.add(layer % count)
    return bound


def _lookahead_map(lookahead: int | Sequence[int], count: int) -> tuple[int, ...]:
    ahead = [lookahead] * count if isinstance(lookahead, int) else list(lookahead)
    if len(ahead) != count:
        raise ValueError(f"lookahead needs {count} entries, one for each layer, got {len(ahead)}")
    for layer, distance in enumerate(ahead):
        if not 0 <= distance < max(count, 2):
            raise ValueError(f"lookahead of layer {layer} is {distance}, outside [0, {count - 1}]")
    return tuple(ahead)
