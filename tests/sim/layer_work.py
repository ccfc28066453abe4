"""One layer of a step in one worker: load, compute, write, announce, save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core import slot_events as se
from kvd.core.holds import Truth
from kvd.core.ids import ReadId
from tests.sim import kept
from tests.sim.clock import MS
from tests.sim.cover import Cover, LoadCover, SaveCover, StepLoadCover, StepSaveCover
from tests.sim.memory import Copy, Piece, write
from tests.sim.tenancy import Part, Request, Step, Tenancy

if TYPE_CHECKING:
    from tests.sim.kept import KeptStep
    from tests.sim.worker import Worker

RETRIED = ("span_busy", "span_unwritten")
"""Codes after which the same event may succeed a little later."""

TRIES_MAX = 40


# Loads ---------------------------------------------------------------------------------------


def keep(worker: Worker, step: Step) -> None:
    """Ask kvd to keep the blocks that all layers of a step copy."""
    parts = [part for part in step.parts if not part.request.ended]
    loads = tuple(_load_of(worker, part) for part in parts if part.start)
    saves = _saves(worker, parts) if worker.contributes else ()
    worker.kept_loads, worker.kept_saves = kept.open_steps(worker, step, loads, saves)


def awaits_step(worker: Worker, layer: int) -> bool:
    """Whether a layer loads something of which kvd's answer to its step decides how."""
    asked = worker.kept_loads
    if asked is None or not asked.is_awaited or worker.step is None:
        return False
    return bool(_loads(worker, worker.step, layer))


def acquire(worker: Worker, tenancy: Tenancy) -> None:
    """Tell kvd that the slot is taken, and what is loaded into it."""
    loads = _loads(worker, tenancy.step, tenancy.layer)
    if worker.kept_loads is not None and worker.kept_loads.keeps(loads):
        _acquire_kept(worker, tenancy, loads, worker.kept_loads)
        return
    event = se.Acquired(tenancy.ref, tenancy.layer, loads)
    if not loads:
        tenancy.ready = True
        worker.say(event)
        return
    if worker.kept_loads is not None:
        number = worker.kept_loads.number_for(loads, refused=True)
        event = se.Acquired(tenancy.ref, tenancy.layer, (), number) if number else event
    tenancy.load_asked = True
    worker.say(event, lambda code: _acquired(worker, tenancy, loads, code))


def _acquire_kept(
    worker: Worker, tenancy: Tenancy, loads: tuple[se.LoadSpec, ...], step: KeptStep
) -> None:
    """Load at once: the step keeps the blocks, whenever kvd hears of this layer."""
    if loads == step.loads:
        event = se.Acquired(tenancy.ref, tenancy.layer, (), step.id.number)
    else:
        event = se.Acquired(tenancy.ref, tenancy.layer, loads)
    worker.say(event, lambda code: _refused_late(worker, tenancy, code))
    step.copies += 1
    worker.world.marks["load before kvd was heard"] += 1
    blocks = frozenset(block for load in loads for block in load.blocks)
    _start_load(worker, tenancy, loads, StepLoadCover(worker.boot, tenancy.ref, step.id, blocks))
    tenancy.kept_loads = step


def _refused_late(worker: Worker, tenancy: Tenancy, code: str) -> None:
    """kvd's answer to a layer whose copies run already, or have ended."""
    if code:
        worker.world.marks[f"copied, then refused: {code}"] += 1
        worker.engine.fail_step(tenancy.step, code)


def _loads(worker: Worker, step: Step, layer: int) -> tuple[se.LoadSpec, ...]:
    loads = []
    for part in step.parts:
        held = part.request.bound_rows.get((worker.rank, layer), 0)
        if part.start and held < part.start:
            loads.append(_load_of(worker, part))
    return tuple(loads)


def _load_of(worker: Worker, part: Part) -> se.LoadSpec:
    blocks = part.request.blocks[: -(-part.start // worker.world.options.block_tokens)]
    return se.LoadSpec(part.request.name, tuple(blocks), part.start)


def _acquired(worker: Worker, tenancy: Tenancy, loads: tuple[se.LoadSpec, ...], code: str) -> None:
    """The loads are pinned and may start, or they may not."""
    tenancy.load_asked = False
    if tenancy.cancelled:
        return
    if code in RETRIED and tenancy.tries < TRIES_MAX:
        tenancy.tries += 1
        worker.later(5 * MS, _acquire_again, worker, tenancy)
    elif code:
        worker.engine.fail_step(tenancy.step, code)
        worker.advance()
    else:
        _start_load(worker, tenancy, loads, LoadCover(worker.boot, tenancy.ref))


def _start_load(
    worker: Worker, tenancy: Tenancy, loads: tuple[se.LoadSpec, ...], cover: Cover
) -> None:
    tenancy.busy += 1
    pieces = tuple(piece for load in loads for piece in _load_pieces(worker, tenancy, load))
    copy = Copy(f"load into {tenancy.ref}", worker.executor, pieces, worker.node, cover)
    worker.world.run_copy(copy, _load_ended, worker, tenancy, loads)


def _acquire_again(worker: Worker, tenancy: Tenancy) -> None:
    if not tenancy.cancelled:
        acquire(worker, tenancy)


def _load_pieces(worker: Worker, tenancy: Tenancy, load: se.LoadSpec) -> list[Piece]:
    size = worker.world.options.block_tokens
    request = next(p.request for p in tenancy.step.parts if p.request.name == load.request)
    target = worker.slot_areas[tenancy.ref.slot]
    pool = worker.pool
    pieces = []
    for at, block in enumerate(load.blocks):
        count = min(size, load.tokens - at * size)
        source = pool.span(block, tenancy.layer, worker.shard)
        pieces.append(Piece(source, 0, target, request.device_blocks[at] * size, count))
    return pieces


def _load_ended(ok: bool, worker: Worker, tenancy: Tenancy, loads: tuple[se.LoadSpec, ...]) -> None:
    worker.call(_load_seen, ok, worker, tenancy, loads)


def _load_seen(ok: bool, worker: Worker, tenancy: Tenancy, loads: tuple[se.LoadSpec, ...]) -> None:
    tenancy.busy -= 1
    if ok:
        for load in loads:
            _check_loaded(worker, tenancy, load)
    worker.say(se.LoadEnded(tenancy.ref, ok))
    if tenancy.kept_loads is not None:
        tenancy.kept_loads.copy_ended()
    tenancy.load_failed = not ok
    if not ok:
        worker.engine.fail_step(tenancy.step, "load failed")
    if tenancy.cancelled:
        worker.say_computed(tenancy, False)
        return
    tenancy.ready = True
    worker.advance()


def _check_loaded(worker: Worker, tenancy: Tenancy, load: se.LoadSpec) -> None:
    size = worker.world.options.block_tokens
    request = next(p.request for p in tenancy.step.parts if p.request.name == load.request)
    for at, first in enumerate(range(0, load.tokens, size)):
        rows = (request.document, first, min(first + size, load.tokens))
        worker.world.oracle.rows_are(
            worker.slot_areas[tenancy.ref.slot], request.device_blocks[at] * size, rows,
            tenancy.layer, worker.shard, "load", str(tenancy.ref),
        )  # fmt: skip


# Computing -----------------------------------------------------------------------------------


def compute(worker: Worker, tenancy: Tenancy) -> None:
    """Write the new rows, announce them, and compute attention for a while."""
    options, rng = worker.world.options, worker.world.rng
    size = options.block_tokens
    tenancy.started = True
    place = worker.slot_areas[tenancy.ref.slot]
    for part in tenancy.step.parts:
        request = part.request
        for row in range(part.start, part.end):
            at = request.device_blocks[row // size] * size + row % size
            tag = request.document.tag(row, tenancy.layer, worker.shard)
            write(place, at, (tag,), True, str(tenancy.ref))
        if tenancy.layer < options.num_bound:
            request.bound_rows[worker.rank, tenancy.layer] = part.end
    tenancy.busy += 1
    _announce(worker, tenancy)
    worker.later(rng.randint(1, options.compute_time), _compute_ended, worker, tenancy)


def _compute_ended(worker: Worker, tenancy: Tenancy) -> None:
    tenancy.busy -= 1
    tenancy.compute_ended = True
    if tenancy.cancelled:
        worker.say_computed(tenancy, False)
    elif tenancy.written or worker.world.options.eager_computed:
        worker.layer_computed(tenancy)


def _announce(worker: Worker, tenancy: Tenancy) -> None:
    """Say `Written` with every save and read of the tenancy."""
    parts = [part for part in tenancy.step.parts if not part.request.ended]
    saves = _saves(worker, parts) if worker.contributes else ()
    reads = [spec for part in parts for spec in _reads(worker, tenancy, part)]
    tenancy.saves = saves
    tenancy.reads = reads
    step = worker.kept_saves
    if step is None or not step.keeps(saves):
        number = step.number_for(saves, refused=False) if step is not None else 0
        said = () if number else saves
        event = se.Written(tenancy.ref, tenancy.layer, said, tuple(reads), number)
        worker.say(event, lambda code: _written(worker, tenancy, saves, code))
        return
    named, number = ((), step.id.number) if saves == step.saves else (saves, 0)
    event = se.Written(tenancy.ref, tenancy.layer, named, tuple(reads), number)
    worker.say(event, lambda code: _written(worker, tenancy, (), code))
    tenancy.kept_saves = step
    for save in saves:
        step.copies += 1
        worker.world.marks["save before kvd was heard"] += 1
        _start_save(worker, tenancy, save)


def _saves(worker: Worker, parts: list[Part]) -> tuple[se.SaveSpec, ...]:
    size = worker.world.options.block_tokens
    specs = []
    for part in parts:
        first, last = part.start // size, -(-part.end // size)
        blocks = tuple(part.request.blocks[first:last])
        tokens = tuple(min(size, part.end - at * size) for at in range(first, last))
        name = part.request.name
        specs.append(se.SaveSpec(name, blocks, tokens, (name,) * len(blocks)))
    if len(specs) > 1 and worker.engine.joins_saves:
        specs = [kept.joined(tuple(specs))]
    return tuple(specs)


def _reads(worker: Worker, tenancy: Tenancy, part: Part) -> list[se.ReadSpec]:
    request = part.request
    if not request.transfer or worker.rank != request.read_rank or part.send_from < 0:
        return []
    size = worker.world.options.block_tokens
    first, last = part.send_from // size, -(-part.end // size)
    pool = tuple(request.blocks[first:last])
    if not worker.contributes or worker.engine.never_redirects:
        pool = ()
    read = ReadId(request.transfer, tenancy.layer, part.send_from, 0)
    device = tuple(request.device_blocks[first:last])
    return [se.ReadSpec(read, request.peer, part.end, device, pool)]


def _written(worker: Worker, tenancy: Tenancy, saves: tuple[se.SaveSpec, ...], code: str) -> None:
    """The saves are armed and may start, or they may not."""
    if not code:
        tenancy.written = True
        for save in saves:
            if tenancy.cancelled:
                _say_save_ended(worker, tenancy, save, False, ())
            else:
                _start_save(worker, tenancy, save)
    elif tenancy.cancelled or tenancy.computed_said or tenancy.kept_saves is not None:
        tenancy.written = True
        if tenancy.kept_saves is not None:
            _refused_late(worker, tenancy, code)
        worker.engine.fail_step(tenancy.step, code)
    elif code in RETRIED and tenancy.tries < TRIES_MAX:
        tenancy.tries += 1
        worker.later(5 * MS, _announce_again, worker, tenancy)
        return
    elif any(part.request.ended for part in tenancy.step.parts) and tenancy.tries < TRIES_MAX:
        # Somebody ended a request of the step: say it again without that one.
        tenancy.tries += 20
        _announce(worker, tenancy)
        return
    else:
        worker.engine.fail_step(tenancy.step, code)
        tenancy.written = True
    if tenancy.compute_ended and not tenancy.computed_said and not tenancy.cancelled:
        worker.layer_computed(tenancy)


def _announce_again(worker: Worker, tenancy: Tenancy) -> None:
    if not tenancy.cancelled and not tenancy.computed_said:
        _announce(worker, tenancy)


# Saves ---------------------------------------------------------------------------------------


def _start_save(worker: Worker, tenancy: Tenancy, save: se.SaveSpec) -> None:
    source = worker.slot_areas[tenancy.ref.slot]
    size = worker.world.options.block_tokens
    owners = [part.request for part in tenancy.step.parts]
    pieces = []
    # A short copy makes less valid than was announced, and says so.
    short = worker.world.happens(worker.world.options.short_rate)
    counts = (*save.tokens[:-1], save.tokens[-1] - short)
    for block, count in zip(save.blocks, counts, strict=True):
        device = _device_block(owners, block)
        target = worker.pool.span(block, tenancy.layer, worker.shard)
        pieces.append(Piece(source, device * size, target, 0, count))
    for request in owners:
        request.open_saves += 1
    tenancy.saves_running[save.saver] = None
    step = tenancy.kept_saves
    cover: Cover = SaveCover(worker.boot, tenancy.ref, save.saver)
    if step is not None:
        cover = StepSaveCover(worker.boot, tenancy.ref, step.id, frozenset(save.blocks))
    name = f"save of {tenancy.ref} by {save.saver}"
    copy = Copy(name, worker.executor, tuple(pieces), worker.node, cover)
    worker.world.run_copy(copy, _save_ended, worker, tenancy, save, counts)


def _device_block(owners: list[Request], block: int) -> int:
    for request in owners:
        if block in request.blocks:
            return request.device_blocks[request.blocks.index(block)]
    raise AssertionError(f"block {block} belongs to nobody in this step")


def _save_ended(
    ok: bool, worker: Worker, tenancy: Tenancy, save: se.SaveSpec, counts: tuple[int, ...]
) -> None:
    worker.call(_save_seen, ok, worker, tenancy, save, counts)


def _save_seen(
    ok: bool, worker: Worker, tenancy: Tenancy, save: se.SaveSpec, counts: tuple[int, ...]
) -> None:
    del tenancy.saves_running[save.saver]
    for part in tenancy.step.parts:
        part.request.open_saves -= 1
        if (not ok or counts != save.tokens) and set(save.blocks) & set(part.request.blocks):
            part.request.failed = True
    _say_save_ended(worker, tenancy, save, ok, counts)
    if tenancy.kept_saves is not None:
        tenancy.kept_saves.copy_ended()
    worker.advance()
    worker.engine.schedule()


def _say_save_ended(
    worker: Worker, tenancy: Tenancy, save: se.SaveSpec, ok: bool, counts: tuple[int, ...]
) -> None:
    good = ok and counts == save.tokens
    tenancy.results[save.saver] = Truth.ENDED_OK if good else Truth.ENDED_FAILED
    if good and worker.world.rng.random() < 0.5:
        counts = ()
    event = se.SaveEnded(tenancy.ref, save.saver, ok, counts)
    worker.say(event)
    worker.end_said(tenancy)
    if worker.world.happens(worker.world.options.duplication):
        worker.later(worker.world.rng.randint(1, 50 * MS), worker.say, event)
