"""What the admin API answers: slots, blocks and engines page by page, stories, configuration."""

from __future__ import annotations

from pydantic import Field

from kvd.server.models import (
    BlockStateName,
    Count,
    HotLayerView,
    HotRequestView,
    Model,
    Seconds,
    SlotCounts,
    SlotState,
    StepCounts,
)


class HoldView(Model):
    """A named party that may still touch a slot's memory."""

    kind: str = Field(description="compute, save or read.")
    owner: str = Field(description="The saver or the read; `engine` for compute.")
    executor: str = Field(description="The process that touches the memory; '' if none may yet.")
    phase: str = Field(description="offered: may not touch yet. running: may.")
    doubt: str = Field(description="none, suspect, fencing or quarantined.")
    late_seconds: float = Field(description="Past its deadline; negative while it is in time.")
    asked: Count = Field(description="Questions asked at this stage of doubt.")


class SlotView(Model):
    """One slot of a worker's ring."""

    engine: str
    member: str
    incarnation: str = Field(description="Hex.")
    slot: Count
    epoch: Count = Field(description="How many times it was released.")
    state: SlotState
    layer: int | None = Field(description="Layer of the tenancy; null when free or not told.")
    saved: str = Field(description="none, open, done or failed.")
    poisoned: bool
    holds: list[HoldView]


class SlotPage(Model):
    """A page of slots, ordered by engine, member, incarnation and slot."""

    items: list[SlotView]
    next: str | None = Field(description="Pass as `after` for the next page; null on the last.")


class BlockView(Model):
    """One block of the pool."""

    block: Count
    state: BlockStateName
    tokens: Count = Field(description="Valid tokens: committed, or asked by the commit so far.")
    hash: str = Field(description="Hex; '' before the commit.")
    namespace: int | None = Field(description="Number of the namespace that its hash is in.")
    owner: str = Field(description="The request that fills it; '' once it is ready.")
    spans: Count = Field(description="Spans of a block: layers times shards.")
    spans_saved: Count = Field(description="Spans that hold tokens; all of them when it is ready.")
    saves_open: Count = Field(description="Open saves into it, and steps that save into it.")
    saving_steps: list[str] = Field(
        default_factory=list,
        description="Some of these steps, at most four. They keep the block as pins do.",
    )
    pins: Count = Field(description="Requests, loads, reads and loading steps that keep the block.")
    pinned_by: list[str] = Field(description="Some of them, at most four.")


class BlockPage(Model):
    """A page of blocks, ordered by number."""

    items: list[BlockView]
    next: str | None = Field(description="Pass as `after` for the next page; null on the last.")
    total: Count = Field(description="Blocks of the pool, whatever their state.")


class MemberView(Model):
    """One member process of an engine."""

    member: str
    incarnation: str = Field(description="Hex.")
    state: str = Field(description="attached, silent (socket closed, process alive) or leaving.")
    scheduler: bool
    rank: int | None
    pid: int
    uid: int | None
    attached_seconds: Seconds | None
    silent_seconds: Seconds | None = Field(description="Since its last frame.")
    slots: SlotCounts
    steps: StepCounts = Field(
        default_factory=lambda: StepCounts(open=0, closing=0),
        description="Its steps that keep blocks.",
    )
    stats: dict[str, float] = Field(description="Figures that it pushed, at most 64.")
    store: str = Field(default="", description="Store that it uses; '' before its hello.")
    about: dict[str, str] = Field(
        default_factory=dict, description="What it says of itself, for people."
    )
    hot_layers: list[HotLayerView] = Field(
        default_factory=list, description="Its indexer layers, all requests, at most 64."
    )
    hot_requests: list[HotRequestView] = Field(
        default_factory=list,
        description="Its requests that decode, those with the most misses first, at most 8.",
    )


class EngineView(Model):
    """One engine and its members."""

    engine: str
    tp_size: Count
    layout: str = Field(description="What its namespace covers; '' for a decode engine.")
    namespace: int | None
    requests: Count
    regions: list[str] = Field(description="Its decode regions.")
    slots: SlotCounts
    members: list[MemberView]
    store: str = Field(default="", description="Store that its scheduler uses; '' if unknown.")
    about: dict[str, str] = Field(
        default_factory=dict,
        description="What its scheduler says of it, and what only its other members say.",
    )


class EnginePage(Model):
    """A page of engines, ordered by name."""

    items: list[EngineView]
    next: str | None = Field(description="Pass as `after` for the next page; null on the last.")


class StoryEntry(Model):
    """One recorded transition."""

    age_seconds: Seconds
    subject: str = Field(description="What it was about.")
    event: str
    details: str = Field(description="The event's own values.")
    outcome: str = Field(description="What followed: effects, codes or states.")


class StoryPage(Model):
    """The latest transitions about one thing, oldest first."""

    id: str
    entries: list[StoryEntry]
    matched: Count = Field(description="Transitions that name it; `entries` has the latest.")
    searched: Count = Field(description="Transitions looked through.")
    dropped: Count = Field(description="Older transitions that are forgotten.")


class ConfigEntry(Model):
    """One key of the configuration."""

    key: str
    value: str
    origin: str = Field(description="default, file, environment or flag, and where in it.")
    reloadable: bool = Field(description="Whether SIGHUP applies a change.")
    description: str


class ConfigPage(Model):
    """All keys."""

    items: list[ConfigEntry]
