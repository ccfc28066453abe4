"""The ring of layer buffers: which layer lives in which slot.

For N cache-bearing layers, I independent (bound) ones and B shared buffers for each bucket of
layers with equal parts, the physical buffers are I + sum(min(B, bucket size)) + spares. The
layers of a bucket take its buffers round robin in layer order; an independent layer has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvd.plan.layout import slot_bytes
from kvd.wire.layout import Part

PartsOfLayer = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """One physical buffer.

    bucket: which bucket's parts it holds.
    layers: the layers that live in it, in layer order; () for a spare.
    bound:  it belongs to one layer for good.
    """

    bucket: int
    layers: tuple[int, ...]
    bound: bool = False


@dataclass(frozen=True, slots=True)
class RingPlan:
    """All physical buffers of one worker and the layers' places in them.

    buckets:    parts of a layer, for each bucket.
    slots:      physical buffers: bound ones, then shared ones, then spares.
    slot_of:    layer -> index into `slots`.
    lookahead:  layer -> how many layers ahead its load may start.
    """

    buckets: tuple[PartsOfLayer, ...]
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
        parts = self.buckets[self.slots[slot].bucket]
        return slot_bytes(parts, self.num_blocks, self.block_tokens)

    @property
    def device_bytes(self) -> int:
        """Bytes of all physical buffers, spares included."""
        return sum(self.bytes_of(slot) for slot in range(len(self.slots)))

    @property
    def resident_bytes(self) -> int:
        """Bytes that one buffer for each layer would take."""
        return sum(
            slot_bytes(self.buckets[self.slots[slot].bucket], self.num_blocks, self.block_tokens)
            for slot in self.slot_of
        )

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
    buckets = tuple(dict.fromkeys(tuple(parts) for parts in layers))
    bucket_of = [buckets.index(tuple(parts)) for parts in layers]
    slots: list[SlotPlan] = []
    slot_of = [-1] * count
    for layer in sorted(bound):
        slot_of[layer] = len(slots)
        slots.append(SlotPlan(bucket_of[layer], (layer,), True))
    sharing: list[int] = []
    for bucket in range(len(buckets)):
        rolling = [n for n in range(count) if bucket_of[n] == bucket and n not in bound]
        first, buffers = len(slots), min(num_shared, len(rolling))
        for turn in range(buffers):
            slots.append(SlotPlan(bucket, tuple(rolling[turn::buffers])))
        for place, layer in enumerate(rolling):
            slot_of[layer] = first + place % buffers
        if len(rolling) > buffers:
            sharing.append(bucket)
    spares = []
    for bucket in sharing:
        for _ in range(spare_buffers):
            spares.append(len(slots))
            slots.append(SlotPlan(bucket, ()))
    why = "" if sharing else "every layer has a buffer of its own"
    return RingPlan(
        buckets,
        tuple(slots),
        tuple(slot_of),
        _lookahead_map(lookahead, count),
        num_blocks,
        block_tokens,
        bool(sharing),
        why,
        tuple(spares),
    )


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
