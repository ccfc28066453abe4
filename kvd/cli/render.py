"""Documents of the admin API as text for people. Pure: a document in, something to lay out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvd.cli.layout import facts, spaced, table, word
from kvd.cli.render_engine import engine_facts, engine_line
from kvd.cli.render_hot import hot_tables, request_table
from kvd.cli.render_pool import eviction_facts, pool_facts
from kvd.cli.text import maybe_seconds, named, percent, seconds, size, yes
from kvd.core.errors import ErrorSpec
from kvd.server.models import (
    Model,
    Reason,
    RegionView,
    SlotCounts,
    Status,
    StepCounts,
    TransferCounts,
    WaitView,
)
from kvd.server.models_tables import (
    BlockPage,
    ConfigPage,
    EnginePage,
    EngineView,
    HoldView,
    MemberView,
    SlotPage,
    StoryPage,
)

_CHECKSUMS: Final = {
    "off": "off: wrong bytes in host memory are not noticed",
    "sampled": "sampled: every eighth span",
    "always": "always",
}

# Status ------------------------------------------------------------------------------------------


def render_status(status: Status) -> RenderableType:
    """The node at one look."""
    parts: list[RenderableType] = [_headline(status)]
    if status.not_ready:
        parts.append(_reasons("NOT READY", status.not_ready))
    known = {reason.code for reason in status.not_ready}
    degraded = [reason for reason in status.degraded if reason.code not in known]
    if degraded:
        parts.append(_reasons("DEGRADED", degraded))
    parts.append(_facts(status))
    if status.regions:
        parts.append(_regions(status))
    if status.engines:
        parts.append(_engine_summaries(status))
    decoding = [(engine.engine, one) for engine in status.engines for one in engine.hot_requests]
    if decoding:
        parts.append(request_table(decoding))
    if status.peers:
        parts.append(_peers(status))
    return Group(*(part for part in spaced(parts)))


def _headline(status: Status) -> Text:
    name = status.phase.upper()
    if status.phase == "starting":
        name = f"STARTING {status.percent}%"
    elif status.phase == "ready" and not status.ready:
        name = "NOT READY"
    good = status.ready and not status.degraded
    text = Text(f"kvd {status.version}  ", style="bold")
    text.append(name, style="bold green" if good else "bold yellow")
    if status.ready and status.degraded:
        text.append(", degraded", style="bold yellow")
    text.append(f"  up {seconds(status.uptime_seconds)}  boot {status.boot_id}", style="not bold")
    if status.detail:
        text.append(f"\n{status.detail}", style="not bold")
    return text


def _reasons(title: str, reasons: Sequence[Reason]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold yellow")
    grid.add_column(overflow="fold")
    for reason in reasons:
        grid.add_row(reason.code, f"{reason.what} {reason.remedy}")
    return Group(Text(title, style="bold yellow"), Padding(grid, (0, 0, 0, 2)))


def _facts(status: Status) -> Table:
    grid = facts([("memory", status.memory.note)])
    if status.memory.last_life:
        grid.add_row("", status.memory.last_life)
    for name, text in (*pool_facts(status.pool), *eviction_facts(status)):
        grid.add_row(name, text)
    mode, bad = status.pool.checksums, status.counters.get("checksum_mismatches", 0)
    grid.add_row("checksums", _CHECKSUMS.get(mode, mode) + (f"; {bad} mismatches" if bad else ""))
    hits = status.hits
    rate = percent(hits.blocks_hit, hits.blocks_asked)
    grid.add_row("prefix hits", f"{rate} ({hits.blocks_hit} of {hits.blocks_asked} blocks asked)")
    grid.add_row("slots", _slot_counts(status.slots))
    grid.add_row("holds", _holds(status))
    for name, text in _wait_facts(status.oldest_wait):
        grid.add_row(name, text)
    grid.add_row("transfers", _transfers(status.transfers))
    grid.add_row("refused", _counts(status.refused))
    grid.add_row("ignored", _counts(status.ignored))
    checked = status.invariants
    verdict = "hold" if checked.ok else f"FAILED: {'; '.join(checked.problems)}"
    grid.add_row("invariants", f"{verdict} ({checked.scope}, {checked.took_ms:.1f} ms)")
    story = status.story
    grid.add_row("story", f"{story.kept} of {story.limit} transitions, {story.dropped} dropped")
    return grid


def _slot_counts(counts: SlotCounts) -> str:
    return (
        f"{counts.total}: {counts.free} free, {counts.held} held, "
        f"{counts.suspect} suspect, {counts.quarantined} quarantined"
    )


def _holds(status: Status) -> str:
    texts = [
        f"{hold.count} {hold.kind}" + (f" ({hold.doubt})" if hold.doubt != "none" else "")
        for hold in status.holds
    ]
    return ", ".join(texts) or "none"


def _wait_facts(wait: WaitView | None) -> Iterable[tuple[str, str]]:
    if wait is None:
        yield "oldest wait", "none"
        return
    age, limit = seconds(wait.age_seconds), seconds(wait.limit_seconds)
    parties = "; ".join(wait.waits_for) or wait.who
    yield "oldest wait", f"{wait.what} {wait.name}: {age} of {limit}, for {parties}"
    if wait.last_event_age_seconds is not None:
        yield "  last event", f"{seconds(wait.last_event_age_seconds)} ago: {wait.last_event}"


def _transfers(counts: TransferCounts) -> str:
    return (
        f"{counts.outgoing_open} out, {counts.incoming_open} in, "
        f"{counts.reads_open} reads open, {counts.copies_running} copying, "
        f"{counts.waiters} waiting, {counts.failed_since_start} failed since start"
    )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def _regions(status: Status) -> Table:
    numbers = ("asked", "got", "populated", "huge")
    made = table("region", "asked", "got", "populated", "pages", "huge", "node", right=numbers)
    for region in status.regions:
        pages = f"{region.page_kind}, {size(region.page_bytes)}"
        made.add_row(
            region.name,
            size(region.asked_bytes),
            size(region.got_bytes),
            size(region.populated_bytes),
            pages + (", locked" if region.locked else ""),
            size(region.huge_bytes),
            _nodes(region),
        )
    return made


def _nodes(region: RegionView) -> str:
    """Where a region is, and where it was asked to be unless that is all the same."""
    total = sum(region.node_bytes.values())
    shares = [
        node if count == total else f"{node} {percent(count, total)}"
        for node, count in region.node_bytes.items()
    ]
    found = ", ".join(shares) or "-"
    return found if region.node == "any" else f"{found} ({region.node} asked)"


def _engine_summaries(status: Status) -> RenderableType:
    numbers = ("members", "requests", "slots", "free", "held", "suspect", "quarantined", "spare")
    made = table("engine", *numbers, right=numbers)
    for engine in status.engines:
        slots = engine.slots
        silent = f" ({engine.silent_members} silent)" if engine.silent_members else ""
        made.add_row(
            engine.engine,
            f"{engine.members}{silent}",
            str(engine.requests),
            str(slots.total),
            str(slots.free),
            str(slots.held),
            str(slots.suspect),
            str(slots.quarantined),
            "-" if engine.spare_left is None else f"{engine.spare_left:g}",
        )
    parts: list[RenderableType] = [made]
    omitted = status.engines_total - len(status.engines)
    if omitted > 0:
        parts.append(Text(f"{omitted} more: kvctl engines"))
    words = facts((engine.engine, engine_line(engine)) for engine in status.engines)
    if words.row_count:
        parts += [Text(""), words]
    return Group(*parts)


def _peers(status: Status) -> Table:
    made = table("peer", "role", "state", "boot", "silent", "error", right=("silent",))
    for peer in status.peers:
        silent = maybe_seconds(peer.silent_seconds)
        boot = peer.boot_id[:8] or "-"
        made.add_row(peer.address or "-", peer.role, word(peer.state), boot, silent, peer.error)
    return made


# Tables ------------------------------------------------------------------------------------------


def render_slots(page: SlotPage) -> RenderableType:
    """Slots with their holds, a line for each hold."""
    if not page.items:
        return Text("no slots")
    made = table("slot", "epoch", "state", "layer", "held by", right=("epoch", "layer"))
    for slot in page.items:
        name = f"{slot.engine}/{slot.member}#{slot.incarnation}/slot{slot.slot}"
        layer = "-" if slot.layer is None else str(slot.layer)
        state = Text.assemble(word(slot.state), " poisoned" if slot.poisoned else "")
        holds = "\n".join(_hold(hold) for hold in slot.holds) or "-"
        made.add_row(name, str(slot.epoch), state, layer, holds)
    return _with_more(made, page.next)


def _hold(hold: HoldView) -> str:
    who = f" by {hold.executor}" if hold.executor else ""
    if hold.late_seconds >= 0:
        time = f"late by {seconds(hold.late_seconds)}"
    else:
        time = f"{seconds(-hold.late_seconds)} left"
    doubt = f", {hold.doubt}, asked {hold.asked}x" if hold.doubt != "none" else ""
    return f"{hold.kind} {hold.owner}{who}: {hold.phase}, {time}{doubt}"


def render_blocks(page: BlockPage) -> RenderableType:
    """Blocks."""
    if not page.items:
        return Text(f"no such blocks among {page.total}")
    made = table(
        "block", "state", "tokens", "spans", "hash", "kept by", right=("block", "tokens", "spans")
    )
    for block in page.items:
        kept = ", ".join((*block.pinned_by, *block.saving_steps)) or "-"
        if block.pins > len(block.pinned_by):
            kept += f" and {block.pins - len(block.pinned_by)} more"
        saves = f" ({block.saves_open} saving)" if block.saves_open else ""
        made.add_row(
            str(block.block),
            word(block.state),
            str(block.tokens),
            f"{block.spans_saved}/{block.spans}{saves}",
            block.hash[:16] or "-",
            kept,
        )
    return _with_more(made, page.next)


def render_engines(page: EnginePage) -> RenderableType:
    """Engines and their members."""
    if not page.items:
        return Text("no engines")
    parts: list[RenderableType] = []
    for engine in page.items:
        title = Text(engine.engine, style="bold")
        regions = f"  regions {', '.join(engine.regions)}" if engine.regions else ""
        store = f"  store {engine.store}" if engine.store else ""
        text = f"  tp {engine.tp_size}  {engine.requests} requests{store}{regions}  {engine.layout}"
        title.append(text.rstrip(), style="not bold")
        below = [Padding(part, (0, 0, 0, 2)) for part in _engine_parts(engine)]
        parts.append(Group(title, *below))
    return Group(*spaced(parts))


def _engine_parts(engine: EngineView) -> Iterable[RenderableType]:
    """What it says of itself, where that is anything; its members."""
    words = facts(engine_facts(engine))
    if words.row_count:
        yield words
    yield _members(engine.members)
    for part in hot_tables(engine.members):
        yield Text("")
        yield part


def _members(members: Sequence[MemberView]) -> Table:
    names = ("member", "rank", "pid", "state", "silent", "slots", "steps", "figures")
    made = table(*names, right=("silent",))
    for member in members:
        role = " scheduler" if member.scheduler else ""
        rank = "-" if member.rank is None else str(member.rank)
        made.add_row(
            f"{member.member}#{member.incarnation}",
            f"{rank}{role}",
            str(member.pid),
            word(member.state),
            maybe_seconds(member.silent_seconds),
            _slot_counts(member.slots),
            _steps(member.steps),
            ", ".join(f"{name} {value:g}" for name, value in member.stats.items()) or "-",
        )
    return made


def _steps(counts: StepCounts) -> str:
    closing = f", {counts.closing} closing" if counts.closing else ""
    return f"{counts.open} open{closing}" if counts.open or closing else "-"


def render_story(page: StoryPage) -> RenderableType:
    """What happened to one thing."""
    made = table("ago", "about", "event", "details", "then", right=("ago",))
    for entry in page.entries:
        ago = seconds(entry.age_seconds)
        made.add_row(ago, entry.subject, entry.event, entry.details or "-", entry.outcome or "-")
    notes = []
    if page.matched > len(page.entries):
        notes.append(f"{page.matched - len(page.entries)} earlier ones: raise --limit")
    if page.dropped:
        notes.append(f"{page.dropped} older transitions of all kinds are forgotten")
    return Group(made, Text("; ".join(notes))) if notes else made


def render_config(page: ConfigPage) -> RenderableType:
    """Every key, its value and where that came from."""
    made = table("key", "value", "origin", "reloadable")
    for row in page.items:
        made.add_row(row.key, row.value or '""', row.origin, yes(row.reloadable))
    return made


def render_errors(rows: Sequence[ErrorSpec]) -> RenderableType:
    """The catalogue, or a part of it."""
    if len(rows) == 1:
        return _one_error(rows[0])
    made = table("code", "what is wrong", "what to do")
    for row in rows:
        made.add_row(row.code, named(row.what), named(row.remedy))
    return made


def _one_error(row: ErrorSpec) -> Table:
    return facts(
        [
            ("code", row.code),
            ("what", named(row.what)),
            ("remedy", named(row.remedy)),
            ("retry", row.retry.value.replace("_", " ")),
            ("HTTP status", str(row.status)),
        ]
    )


def _with_more(content: RenderableType, after: str | None) -> RenderableType:
    if after is None:
        return content
    return Group(content, Text(f"more: --after {after}, or raise --limit"))


_RENDERERS: Final[Mapping[type[Model], Callable[..., RenderableType]]] = {
    Status: render_status,
    SlotPage: render_slots,
    BlockPage: render_blocks,
    EnginePage: render_engines,
    StoryPage: render_story,
    ConfigPage: render_config,
}


def render(document: Model) -> RenderableType:
    """Any document that `kvctl` shows; another one is a bug and raises KeyError."""
    return _RENDERERS[type(document)](document)
