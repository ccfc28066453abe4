"""Every metric: name, kind, labels and meaning. `docs/metrics.md` is made from this table.

Labels have bounded sets: states and codes are fixed in the code, names of engines and regions are
those of live ones only (an engine that left takes its label sets along).
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple


class MetricSpec(NamedTuple):
    """One metric. Names of counters end in `_total`."""

    name: str
    kind: Literal["gauge", "counter"]
    labels: tuple[str, ...]
    help: str


def _gauge(name: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(f"kvd_{name}", "gauge", labels, text)


def _counter(name: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(f"kvd_{name}_total", "counter", labels, text)


_NODE: Final = (
    _gauge("info", "1; the labels say which kvd answered.", "version", "boot_id"),
    _gauge("start_time_seconds", "When this kvd started, seconds since 1970."),
    _gauge("phase", "1 for the present phase, 0 for the others.", "phase"),
    _gauge("populated_percent", "Host memory of the pool that is populated."),
    _gauge("ready", "1 when /readyz answers 200."),
    _gauge("not_ready", "1 for each reason that keeps new work away.", "reason"),
    _gauge("degraded", "1 for each reason why an operator should look.", "reason"),
    _gauge("invariants_ok", "1 while kvd's books do not contradict themselves."),
    _gauge("invariants_check_seconds", "CPU time of the latest check of the books."),
    _gauge("rss_bytes", "Resident memory of the kvd process, pool included."),
    _gauge("process_figure", "Further figures of the process, by name.", "figure"),
)

_MEMORY: Final = (
    _gauge("region_asked_bytes", "Size that was asked for.", "region"),
    _gauge("region_bytes", "Size, rounded up to whole pages.", "region"),
    _gauge("region_populated_bytes", "Resident so far.", "region"),
    _gauge("region_huge_bytes", "Mapped with huge pages.", "region"),
    _gauge("region_page_bytes", "Size of its pages, as the kernel reports it.", "region"),
    _gauge(
        "region_node_bytes",
        "Populated bytes by NUMA node, as the kernel reports them.",
        "region",
        "node",
    ),
    _gauge("region_stray_bytes", "Of these, on another node than was asked for.", "region"),
)

_POOL: Final = (
    _gauge("pool_configured_bytes", "pool.size."),
    _gauge("pool_unused_bytes", "Of pool.size, what the blocks do not cover."),
    _gauge("pool_capacity_blocks", "Blocks of the pool: the sum of kvd_pool_blocks."),
    _gauge("pool_capacity_tokens", "Tokens that all blocks together hold."),
    _gauge("pool_block_bytes", "Bytes of one block."),
    _gauge("pool_block_tokens", "Tokens of one full block."),
    _gauge("pool_blocks", "Blocks by state: free, filling, ready, poisoned.", "state"),
    _gauge("pool_bytes", "The same in bytes.", "state"),
    _gauge("pool_pinned_blocks", "Blocks that somebody keeps."),
    _gauge("pool_evictable_blocks", "Ready blocks that nobody keeps."),
    _counter("lookup_blocks_asked", "Blocks asked for in look-ups: the denominator of hits."),
    _counter("lookup_blocks_hit", "Blocks of these that were found."),
    _gauge("pool_new_blocks", "Evictable blocks not asked for since they are ready."),
    _gauge("pool_used_blocks", "Evictable blocks that were asked for again."),
    _gauge("pool_new_room_blocks", "New blocks that are kept before used ones are evicted."),
    _gauge("pool_high_water", "Share of blocks in use above which room is made."),
    _gauge("pool_low_water", "Share of blocks in use where that ends."),
    _gauge("saves_shed_blocks", "Blocks left unsaved under pressure, by attached engines."),
    _counter("blocks_admitted", "Blocks that became ready."),
    _counter("blocks_evicted", "Ready blocks that made room."),
    _counter("blocks_evicted_ahead", "Blocks of these that went above high water."),
    _counter("ghost_hits", "Blocks admitted again soon after they were evicted."),
    _counter("blocks_poisoned", "Blocks poisoned by an engine or with a tenancy, not by a save."),
    _counter("checksum_mismatches", "Spans whose bytes were not those that had been saved."),
    _counter("commits", "Commits by outcome: pending, ready, duplicate.", "outcome"),
    _counter("saves", "Saves that ended, by outcome: ok, failed.", "outcome"),
    _counter("leases_expired", "Look-ups whose pins ended because nobody renewed them."),
    _counter("pool_reformatted", "Times that the pool got another layout."),
)

_SLOTS: Final = (
    _gauge("slots", "Slots by state: free, held, suspect, quarantined.", "engine", "state"),
    _gauge("holds", "Open holds by kind and doubt.", "kind", "doubt"),
    _gauge("oldest_wait_seconds", "How long the oldest wait has lasted; 0 without any."),
    _gauge("oldest_wait_limit_seconds", "From this age on the node is not ready."),
    _counter("slot_releases", "Slots whose last hold went."),
    _counter("fences_asked", "Fences asked for, repeated ones included."),
    _counter("quarantines", "Holds that could be neither believed nor fenced."),
    _counter("slots_taken_over", "Held slots announced by members of an earlier kvd."),
)

_ENGINES: Final = (
    _gauge("engines", "Registered engines."),
    _gauge("members", "Members by state: attached, silent, leaving.", "state"),
    _gauge("engine_requests", "Requests that keep blocks.", "engine"),
    _gauge(
        "steps",
        "Steps of members that keep blocks, by state: open, closing (copies of them still run).",
        "engine",
        "state",
    ),
    _gauge("sessions", "Attached processes by kind: member, reader.", "kind"),
    _gauge(
        "engine_stat",
        "Figures that engines push; may be of any sign. At most 64 of a member, 1024 in all.",
        "engine",
        "member",
        "stat",
    ),
    _gauge("engine_stats_omitted", "Figures beyond that, not shown."),
    _gauge(
        "hot_rows",
        "Rows that decode selected, by indexer layer and what became of them: hits (in the hot "
        "buffer), misses (loaded), merged (selected by another position of the step as well); "
        "since the engine's start. At most 64 layers of a member, 512 in all.",
        "engine",
        "member",
        "layer",
        "fate",
    ),
    _gauge(
        "hot_managed_seconds",
        "Time in the books of hot buffers for a step of a request, from some of the steps.",
        "engine",
        "member",
        "layer",
    ),
    _gauge(
        "hot_overlap_ratio",
        "Share of the loads' time that was hidden behind other work, from some of the steps.",
        "engine",
        "member",
        "layer",
    ),
    _counter("members_died", "Members that are gone."),
    _counter("members_silent", "Times that a living member's socket closed."),
    _counter("members_reattached", "Times that a member attached again."),
)

_TRANSFERS: Final = (
    _gauge("transfers_open", "Transfers that are not over, by direction.", "direction"),
    _gauge("reads_open", "Reads offered or granted by this kvd."),
    _gauge("copies_running", "Reads that this kvd executes now."),
    _gauge("waiters", "Calls that wait for the end of a transfer."),
    _gauge("peers", "Links to other kvds by role and state.", "role", "state"),
    _counter("transfers_failed", "Transfers that failed, either side."),
    _counter("waits_expired", "Waits for a transfer that reached their deadline."),
    _counter("reads_finished", "Offered reads whose rows arrived."),
    _counter("reads_redirected", "Reads moved from a slot to the pool."),
    _counter("reads_failed", "Offered reads that failed, by reason.", "reason"),
    _counter("copies", "Reads executed here, by outcome: ok, failed, unknown.", "outcome"),
    _counter("copied_bytes", "Bytes that these copied."),
)

_TRAFFIC: Final = (
    _counter("frames_received", "Frames of members."),
    _counter("replies_dropped", "Replies that could not be delivered."),
    _counter("refused", "Refusals, by what was refused and code.", "what", "code"),
    _counter("ignored", "Expected races that changed nothing, by reason.", "reason"),
    _counter("events", "Everything else that is counted, by name.", "event"),
    _gauge("story_entries", "Transitions that `kvctl story` can look through."),
    _counter("story_dropped", "Older transitions that made room."),
)

SECTIONS: Final = (
    ("Node", _NODE),
    ("Memory", _MEMORY),
    ("Pool", _POOL),
    ("Slots", _SLOTS),
    ("Engines", _ENGINES),
    ("Transfers", _TRANSFERS),
    ("Traffic", _TRAFFIC),
)

SPECS: Final = tuple(spec for _, specs in SECTIONS for spec in specs)

COUNTERS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "lookup_blocks_asked": ("kvd_lookup_blocks_asked_total", ()),
    "lookup_blocks_hit": ("kvd_lookup_blocks_hit_total", ()),
    "blocks_admitted": ("kvd_blocks_admitted_total", ()),
    "blocks_evicted_ahead": ("kvd_blocks_evicted_ahead_total", ()),
    "blocks_evicted": ("kvd_blocks_evicted_total", ()),
    "blocks_poisoned": ("kvd_blocks_poisoned_total", ()),
    "checksum_mismatches": ("kvd_checksum_mismatches_total", ()),
    "commit_pending": ("kvd_commits_total", ("pending",)),
    "commit_ready": ("kvd_commits_total", ("ready",)),
    "commit_duplicate": ("kvd_commits_total", ("duplicate",)),
    "saves_ok": ("kvd_saves_total", ("ok",)),
    "saves_failed": ("kvd_saves_total", ("failed",)),
    "leases_expired": ("kvd_leases_expired_total", ()),
    "pool_reformatted": ("kvd_pool_reformatted_total", ()),
    "releases": ("kvd_slot_releases_total", ()),
    "fences_asked": ("kvd_fences_asked_total", ()),
    "quarantines": ("kvd_quarantines_total", ()),
    "slots_taken_over": ("kvd_slots_taken_over_total", ()),
    "members_died": ("kvd_members_died_total", ()),
    "members_silent": ("kvd_members_silent_total", ()),
    "members_reattached": ("kvd_members_reattached_total", ()),
    "transfers_failed": ("kvd_transfers_failed_total", ()),
    "waits_expired": ("kvd_waits_expired_total", ()),
    "reads_finished": ("kvd_reads_finished_total", ()),
    "reads_redirected": ("kvd_reads_redirected_total", ()),
    "copies_ok": ("kvd_copies_total", ("ok",)),
    "copies_failed": ("kvd_copies_total", ("failed",)),
    "copies_unknown": ("kvd_copies_total", ("unknown",)),
    "copies_bytes": ("kvd_copied_bytes_total", ()),
    "frames_received": ("kvd_frames_received_total", ()),
    "replies_dropped": ("kvd_replies_dropped_total", ()),
}
"""Counters of the node with a metric of their own, shown from 0 on; others are `kvd_events`."""

READS_FAILED: Final = "reads_failed_"
"""Counters that begin so are `kvd_reads_failed` with the rest as reason."""
