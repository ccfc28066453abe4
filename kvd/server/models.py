"""What the admin API answers: the status at one look, readiness and refusals.

Durations are seconds, sizes are bytes, both as the names say. A client ignores members that it
does not know, so that an older `kvctl` reads a newer kvd.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

SlotState = Literal["free", "held", "suspect", "quarantined"]
BlockStateName = Literal["free", "filling", "ready", "poisoned"]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]


class Model(BaseModel):
    """Base of all documents."""

    # Built when first used: neither `kvctl` nor the start of the daemon needs all of them.
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class Problem(Model):
    """Why something was refused (RFC 9457)."""

    type: str = Field(description="`urn:kvd:error:<code>`.")
    title: str = Field(description="The code in words.")
    status: int = Field(description="HTTP status.")
    detail: str = Field(description="What is wrong, one sentence.")
    code: str = Field(description="Stable identifier; `kvctl errors <code>` explains it.")
    remedy: str = Field(description="What to do about it.")


class Reason(Model):
    """One reason why the node is not ready, or is degraded."""

    code: str = Field(description="Stable identifier of the kind of reason.")
    what: str = Field(description="What is the matter, with names.")
    remedy: str = Field(description="What to do about it.")


class Liveness(Model):
    """The event loop answers; nothing else is claimed."""

    alive: Literal[True] = True


class Readiness(Model):
    """Whether the node should get new work; the HTTP status says the same (200 or 503)."""

    ready: bool
    phase: str = Field(description="starting, ready, stopping or failed.")
    percent: int = Field(ge=0, le=100, description="Host memory populated so far.")
    detail: str = Field(description="What the daemon is doing, or why it failed.")
    reasons: list[Reason] = Field(description="Why it is not ready; empty when it is.")


class MemoryView(Model):
    """Who owns the host memory and what its content outlives."""

    provider: str = Field(description="memfd, or empty while there is no memory yet.")
    owner: str = Field(description="Who keeps it beside kvd: holder, fdstore or none.")
    survives: list[str] = Field(description="Whose death the content outlives.")
    last_life: str = Field(description="What became of an earlier kvd's memory; may be empty.")
    note: str = Field(description="The same for people.")


class RegionView(Model):
    """One mapping of host memory."""

    name: str
    provider: str
    survives: list[str]
    asked_bytes: Count = Field(description="What the configuration or the engine asked for.")
    got_bytes: Count = Field(description="Asked, rounded up to whole pages.")
    populated_bytes: Count = Field(description="Resident so far.")
    page_kind: str = Field(description="hugetlb, thp or base, as planned.")
    page_bytes: Count = Field(description="Page size that the kernel reports.")
    huge_bytes: Count = Field(description="Mapped with huge pages, as the kernel reports it.")
    reason: str = Field(description="Why these pages.")
    node: str = Field(description="NUMA node that was asked for: any, interleave or a number.")
    node_bytes: dict[str, Count] = Field(
        description="Populated bytes on each NUMA node, as the kernel reports them; empty unless "
        "it does. From a sample of the pages of a large region."
    )
    stray_bytes: Count = Field(description="Of these, on another node than was asked for.")
    locked: bool = Field(description="Kept from the swap space.")


class BlockCounts(Model):
    """Blocks, or bytes in them, by state. free + filling + ready + poisoned = total."""

    total: Count
    free: Count
    filling: Count
    ready: Count
    poisoned: Count


class PoolView(Model):
    """The prefill pool."""

    formatted: bool = Field(description="False until an engine has given it a layout.")
    configured_bytes: Count
    unused_bytes: Count = Field(description="Of these, what the blocks do not cover.")
    block_bytes: Count = Field(description="Bytes of one block.")
    block_tokens: Count = Field(description="Tokens of one full block.")
    layers: Count
    shards: Count
    blocks: BlockCounts
    bytes: BlockCounts
    pinned_blocks: Count = Field(description="Blocks that somebody keeps.")
    evictable_blocks: Count = Field(description="Ready blocks that nobody keeps.")
    tokens_fit: Count = Field(description="Tokens that all blocks together hold.")
    checksums: str = Field(description="Spans that have checksums: off, sampled or always.")


class EvictionView(Model):
    """What makes room in the pool. Counts are blocks, most of them since it has its layout."""

    policy: str = Field(description="pool.eviction.")
    high_water: float = Field(description="Share of blocks in use above which room is made.")
    low_water: float = Field(description="Share of blocks in use where that ends.")
    admitted: Count = Field(description="Became ready.")
    found: Count = Field(description="Were asked for again.")
    evicted: Count
    evicted_ahead: Count = Field(description="Evicted above high water; since start.")
    ghost_hits: Count = Field(description="Were admitted again soon after they were evicted.")
    new_blocks: Count = Field(description="Evictable and not asked for since they are ready.")
    used_blocks: Count = Field(description="Evictable and asked for again.")
    new_room: Count = Field(description="New blocks that are kept before used ones are evicted.")
    saves_shed: Count = Field(
        description="Left unsaved under pressure, by the engines that are attached."
    )


class HitRate(Model):
    """Prefix hits in blocks since start, with their denominator."""

    blocks_asked: Count
    blocks_hit: Count
    rate: float | None = Field(description="hit / asked; null while nothing was asked.")


class SlotCounts(Model):
    """Slots by state. free + held + suspect + quarantined = total."""

    total: Count
    free: Count
    held: Count = Field(description="Held by parties that are in time.")
    suspect: Count = Field(description="Held by a party that is late and being asked or fenced.")
    quarantined: Count = Field(description="Held by a party that can be neither asked nor fenced.")


class StepCounts(Model):
    """Steps that keep blocks."""

    open: Count = Field(description="Copies of them may begin at any time.")
    closing: Count = Field(description="No copy of them begins any more, but some still run.")


class HoldCount(Model):
    """Open holds of one kind at one stage of doubt."""

    kind: str = Field(description="compute, save, or read (of a slot or of the pool).")
    doubt: str = Field(description="none, suspect, fencing or quarantined.")
    count: Count


class WaitView(Model):
    """The wait that has lasted longest; quarantined slots are told among the reasons instead."""

    what: str = Field(description="slot, read (of the pool) or transfer.")
    name: str = Field(description="Name to ask `kvctl story` about.")
    who: str = Field(description="Whom the slot waits for, or who waits for the transfer.")
    age_seconds: Seconds
    limit_seconds: Seconds = Field(description="From this age on the node is not ready.")
    last_event: str = Field(description="The last recorded event about it.")
    last_event_age_seconds: Seconds | None
    waits_for: list[str] = Field(description="The parties that have not ended, at most eight.")


class HotLayerView(Model):
    """One indexer layer of a decode engine, and the layers that follow its selection."""

    layer: Count = Field(description="The engine's layer that has the indexer.")
    hits: Count = Field(description="Selected rows that were in the hot buffer.")
    misses: Count = Field(description="Selected rows that were loaded.")
    merged: Count = Field(description="Selected by another position of the step as well.")
    managed_seconds: Seconds = Field(description="In the books, for one step of a request.")
    overlap: float | None = Field(
        ge=0, le=1, description="Share of the loads' time that was hidden; null if none was timed."
    )


class HotRequestView(Model):
    """One request that has a hot buffer, all layers together."""

    request: str = Field(description="The engine's name of it.")
    steps: Count = Field(description="Decode steps so far.")
    hits: Count = Field(description="Selected rows that were in the hot buffer.")
    misses: Count = Field(description="Selected rows that were loaded.")
    merged: Count = Field(description="Selected by another position of the step as well.")
    managed_seconds: Seconds = Field(description="In the books, for one step, all layers.")
    overlap: float | None = Field(
        ge=0, le=1, description="Share of the loads' time that was hidden; null if none was timed."
    )
    layers: list[HotLayerView] = Field(
        default_factory=list, description="At most 64; in the tables of engines only."
    )


class EngineSummary(Model):
    """One engine in the status."""

    engine: str
    members: Count
    silent_members: Count = Field(description="Their socket closed while their process lives.")
    requests: Count
    slots: SlotCounts
    spare_left: float | None = Field(description="Spare buffers left, if the engine tells.")
    store: str = Field(default="", description="Store that its scheduler uses; '' if unknown.")
    about: dict[str, str] = Field(
        default_factory=dict,
        description="What its scheduler says of it, and what only its other members say.",
    )
    hot_requests: list[HotRequestView] = Field(
        default_factory=list,
        description="Requests that decode, those with the most misses first, at most 8.",
    )


class TransferCounts(Model):
    """Transfers between prefill and decode."""

    outgoing_open: Count
    outgoing_failed: Count = Field(description="Failed, and still remembered.")
    reads_open: Count = Field(description="Reads offered or granted by this kvd.")
    incoming_open: Count
    incoming_failed: Count = Field(description="Failed, and still remembered.")
    copies_running: Count = Field(description="Reads that this kvd executes now.")
    waiters: Count = Field(description="Calls that wait for the end of a transfer.")
    failed_since_start: Count


class PeerView(Model):
    """One link to another kvd."""

    address: str
    role: str = Field(description="producer (it offers rows) or consumer (it reads them).")
    boot_id: str
    state: str
    silent_seconds: Seconds | None = Field(description="Since it was last heard; null: never.")
    error: str


class StoryView(Model):
    """How far back `kvctl story` can look."""

    kept: Count
    limit: Count
    dropped: Count = Field(description="Older transitions that made room.")


class InvariantsView(Model):
    """Whether kvd's books contradict themselves."""

    ok: bool
    scope: Literal["full", "totals"] = Field(
        description="totals: the books are too large to be checked in full within a request."
    )
    problems: list[str] = Field(description="At most twenty.")
    took_ms: Seconds = Field(description="What the check took, milliseconds of CPU time.")
    age_seconds: Seconds = Field(description="How long ago it ran.")


class Status(Model):
    """The node at one look."""

    version: str
    boot_id: str
    phase: str = Field(description="starting, ready, stopping or failed.")
    percent: int = Field(ge=0, le=100, description="Host memory populated so far.")
    detail: str
    ready: bool
    not_ready: list[Reason]
    degraded: list[Reason] = Field(description="What needs an operator, even if it is ready.")
    started_at: float = Field(description="Seconds since 1970.")
    uptime_seconds: Seconds
    memory: MemoryView
    regions: list[RegionView]
    pool: PoolView
    eviction: EvictionView
    hits: HitRate
    slots: SlotCounts
    holds: list[HoldCount]
    oldest_wait: WaitView | None
    engines: list[EngineSummary] = Field(description="At most 64; all of them: /v1/engines.")
    engines_total: Count
    transfers: TransferCounts
    peers: list[PeerView]
    refused: dict[str, int] = Field(description="Refusals since start, by code.")
    ignored: dict[str, int] = Field(description="Expected races since start, by reason.")
    counters: dict[str, int] = Field(description="Everything else that is counted.")
    story: StoryView
    process: dict[str, float] = Field(description="Memory and event-loop figures of kvd.")
    invariants: InvariantsView
