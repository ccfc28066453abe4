"""The limits: every table, queue and batch of the daemon has a size set at start.

`docs/limits.md` is made from this file. A limit never grows by itself, and what is too many gets
the answer that its `at_limit` names while everything admitted before goes on.
"""

from __future__ import annotations

from pydantic import BaseModel

from kvd.config.fields import count_field


class LimitsConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """Sizes of tables, queues and batches; each says what happens at the limit."""

    engines: int = count_field(
        16,
        1,
        1024,
        "Engines registered at once.",
        at_limit="The hello of one more is refused with limit_reached.",
    )
    members_per_engine: int = count_field(
        17,
        1,
        1025,
        "Members of one engine: its scheduler and one worker per rank.",
        at_limit="The hello of one more is refused with limit_reached.",
    )
    slots_per_member: int = count_field(
        1024,
        1,
        65_536,
        "Slots of one worker's ring, spare and bound ones included.",
        at_limit="A larger ring is refused with limit_reached when it is registered.",
    )
    readers_per_slot: int = count_field(
        64,
        1,
        1024,
        "Reads armed for one slot at once.",
        at_limit="With more, none is armed and limit_reached is the answer.",
    )
    requests_per_engine: int = count_field(
        4096,
        1,
        1_048_576,
        "Requests of one engine that have pins or reservations at once.",
        at_limit="The lookup or reserve of one more is refused with limit_reached.",
    )
    blocks_per_request: int = count_field(
        65_536,
        1,
        1_048_576,
        "Blocks of one request, and of one step of a member.",
        at_limit="A longer request is refused with limit_reached; so is a longer step, which is "
        "then asked for layer by layer.",
    )
    batch_items: int = count_field(
        256,
        1,
        65_536,
        "Items of one batch. A batch is applied in one go, at about 10 us for an item: larger ones "
        "delay everybody else's gates.",
        at_limit="A larger batch is refused with limit_reached; nothing of it is applied.",
    )
    waiters: int = count_field(
        1024,
        1,
        1_048_576,
        "Calls that wait for a slot, a block or a transfer at once.",
        at_limit="One more is answered busy.",
    )
    transfers: int = count_field(
        1024,
        1,
        1_048_576,
        "Transfers between prefill and decode that have not ended, for each of the two sides.",
        at_limit="One more is refused with limit_reached.",
    )
    regions: int = count_field(
        64,
        1,
        4096,
        "Decode regions.",
        at_limit="One more is refused with limit_reached.",
    )
    peers: int = count_field(
        64,
        1,
        4096,
        "Other kvd daemons known at once.",
        at_limit="One more is answered busy; an address that nobody answers on gives way to it.",
    )
    story_entries: int = count_field(
        16_384,
        16,
        16_777_216,
        "Transitions kept for `kvctl story`.",
        at_limit="The oldest is dropped and counted.",
    )
    sessions: int = count_field(
        128,
        1,
        65_536,
        "Processes attached at once: members, readers and peers.",
        at_limit="The attach of one more is answered busy.",
    )
