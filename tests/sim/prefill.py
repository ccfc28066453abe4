"""A prefill engine: a scheduler member, its workers, and the requests between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core import events as ev
from kvd.core.errors import KvdError
from kvd.core.ids import MemberRef
from kvd.core.results import Found, ItemStatuses, Taken, TransferOver
from tests.sim.clock import MS
from tests.sim.content import Document
from tests.sim.member import Answer, Member
from tests.sim.memory import Violation
from tests.sim.tenancy import Part, Request, Step
from tests.sim.worker import Worker

if TYPE_CHECKING:
    from tests.sim.node import Node
    from tests.sim.world import World

STEP_MAX = 1500 * MS
"""A step that takes longer is given up: a slot may be quarantined."""

TRIES_MAX = 8
COMMIT_CODES = ("", "duplicate", "block_not_reserved", "block_poisoned")
RESERVE_CODES = ("pool_full", "reserve_too_large", "request_ended")


class Scheduler(Member):
    """The member that decides about requests."""

    def __init__(self, engine: PrefillEngine, ref: MemberRef) -> None:
        super().__init__(engine.world, engine.node, ref)
        self.engine = engine

    def hello(self) -> ev.MemberJoined:
        """See `Member`."""
        tp_size = self.world.options.tp_size
        return ev.MemberJoined(
            0, self.ref, 1, True, -1, tp_size, 0, False, 0, self.engine.layout, b"probe"
        )

    def on_attached(self) -> None:
        """See `Member`."""
        self.engine.member_attached()

    def on_lost(self) -> None:
        """See `Member`."""
        self.engine.member_lost()


class PrefillEngine:
    """One life of one engine. `ready`: all members have a session with the same life of kvd."""

    def __init__(self, world: World, node: Node, name: str, incarnation: int) -> None:
        options = world.options
        self.world = world
        self.node = node
        self.name = name
        self.incarnation = incarnation
        self.layout = ev.Layout(b"layout", options.shape, 4096, "simulated")
        self.ready = False
        self.closing = False
        self.joins_saves = world.rng.random() < 0.5
        self.await_rate = world.rng.choice((0.0, 0.8, 1.0))
        self.never_redirects = world.rng.random() < 0.05
        self.requests: dict[str, Request] = {}
        self.queue: list[Request] = []
        self.step: Step | None = None
        self.free_device = list(range(options.device_blocks))
        self.scheduler = Scheduler(self, MemberRef(name, "scheduler", incarnation))
        self.workers = [
            Worker(self, MemberRef(name, f"worker{rank}", incarnation), rank)
            for rank in range(options.tp_size)
        ]
        self.members: list[Member] = [self.scheduler, *self.workers]
        self._to_end: list[str] = []
        self._num_steps = 0
        for member in self.members:
            member.later(world.rng.randint(0, 5 * MS), member.attach)

    @property
    def alive(self) -> bool:
        """Whether all its processes live."""
        return all(member.alive for member in self.members)

    # The session -----------------------------------------------------------------------------

    def member_attached(self) -> None:
        """Go on once all members are attached to the same life of kvd."""
        boots = {member.boot for member in self.members}
        if len(boots) == 1 and 0 not in boots:
            self.ready = True
            # What ended while nobody could be told; a new kvd does not know it.
            ended, self._to_end = self._to_end, []
            for name in ended:
                self._unpin(name, aborted=True)

    def member_lost(self) -> None:
        """No kvd, no pool: running requests end, running copies end by themselves."""
        self.ready = False
        for worker in self.workers:
            worker.call(worker.cancel)
        if self.step is not None:
            self.step.failed = True
            self.step = None
        for request in list(self.requests.values()):
            request.in_step = False
            self.abort(request)
            self._forget(request)
        self.queue.clear()

    # Requests --------------------------------------------------------------------------------

    def submit(
        self, document: Document, length: int, transfer: str = "", peer: str = "", rank: int = 0
    ) -> None:
        """A request arrives; it is dropped when the engine is not ready."""
        if not self.ready or self.closing or not self.scheduler.alive:
            return
        name = f"r{self.world.next_number()}"
        request = Request(name, document, length, transfer, peer, rank)
        self.requests[name] = request
        size = self.world.options.block_tokens
        ends = range(size, length + 1, size)
        name_block = self.world.oracle.name_block
        hashes = b"".join(name_block(document, end - size, end) for end in ends)
        event = ev.LookedUp(0, self.scheduler.ref, name, hashes)
        self.scheduler.ask(event, lambda answer: self._found(request, answer))

    def _found(self, request: Request, answer: Answer) -> None:
        if not isinstance(answer, Found) or request.ended:
            if isinstance(answer, KvdError):
                raise Violation("never", f"look-up of {request.name} refused with {answer}")
            self.abort(request)
            return
        rng, size = self.world.rng, self.world.options.block_tokens
        if rng.random() < 0.05 and not request.transfer:
            # Never followed by work: the lease must give the pins back.
            request.ended = True
            del self.requests[request.name]
            return
        num_hit = min(len(answer.blocks), (request.length - 1) // size)
        spare = answer.blocks[num_hit:]
        if num_hit > 1 and rng.random() < 0.1:
            num_hit -= 1
            spare = answer.blocks[num_hit:]
        if spare and rng.random() < 0.7:
            self._unpin(request.name, blocks=spare)
        request.blocks = list(answer.blocks[:num_hit])
        request.computed = request.committed = num_hit * size
        if rng.random() < 0.2 and num_hit:
            event = ev.Renewed(0, self.scheduler.ref, request.name)
            self.scheduler.ask(event, lambda _: None)
        self.queue.append(request)
        self.schedule()

    def abort(self, request: Request) -> None:
        """The request is over, whatever it does now."""
        self._end(request, aborted=True)

    def _end(self, request: Request, *, aborted: bool) -> None:
        if request.ended:
            return
        request.ended = True
        if aborted and request.in_step and any(worker.has_kept for worker in self.workers):
            self.world.marks["abort under a step"] += 1
        if request in self.queue:
            self.queue.remove(request)
        self._unpin(request.name, aborted=aborted)
        if aborted and request.transfer:
            event = ev.TransferDropped(0, self.scheduler.ref, request.transfer, request.peer)
            self.scheduler.ask(event, lambda _: None)
        if not request.in_step:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        if self.requests.pop(request.name, None) is not None:
            self.free_device += request.device_blocks

    def _unpin(
        self, name: str, *, aborted: bool = False, blocks: tuple[int, ...] | None = None
    ) -> None:
        event = ev.RequestEnded(0, self.scheduler.ref, name, blocks, aborted)
        self.scheduler.ask(event, lambda answer: self._unpinned(name, answer))

    def _unpinned(self, name: str, answer: Answer) -> None:
        if answer is None:
            self._to_end.append(name)
        elif isinstance(answer, KvdError):
            raise Violation("never", f"unpin of {name} refused with {answer}")

    # Steps -----------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Start the next step when there is work and nothing runs."""
        if self.step is not None or not self.ready or not self.scheduler.alive:
            return
        options, rng = self.world.options, self.world.rng
        parts: list[Part] = []
        for request in list(self.queue):
            if request.failed:
                self.abort(request)
            elif not request.waiting and self._has_device_blocks(request):
                end = min(request.length, request.computed + rng.randint(1, options.chunk_max))
                have = len(request.blocks) * options.block_tokens
                if have < end:
                    self._reserve(request, end)
                elif not request.open_saves or rng.random() < 0.3:
                    parts.append(Part(request, request.computed, end))
            if len(parts) == options.batch_max:
                break
        if parts:
            self._begin(parts)

    def _has_device_blocks(self, request: Request) -> bool:
        need = -(-request.length // self.world.options.block_tokens)
        if not request.device_blocks and len(self.free_device) >= need:
            request.device_blocks = [self.free_device.pop(0) for _ in range(need)]
        return bool(request.device_blocks)

    def _reserve(self, request: Request, end: int) -> None:
        request.waiting = True
        count = -(-end // self.world.options.block_tokens) - len(request.blocks)
        event = ev.Reserved(0, self.scheduler.ref, request.name, count)
        self.scheduler.ask(event, lambda answer: self._taken(request, answer))

    def _taken(self, request: Request, answer: Answer) -> None:
        if request.ended:
            # One of its transmissions may have been done after the request was ended.
            self._unpin(request.name, aborted=True)
            return
        if isinstance(answer, Taken):
            request.blocks += answer.blocks
            request.waiting = False
            self.schedule()
            return
        if isinstance(answer, KvdError) and answer.code not in RESERVE_CODES:
            raise Violation("never", f"reserve for {request.name} refused with {answer}")
        request.tries += 1
        if answer is None or request.tries > TRIES_MAX:
            self.abort(request)
        else:
            self.scheduler.later(20 * MS, self._reserve_again, request)

    def _reserve_again(self, request: Request) -> None:
        request.waiting = False
        self.schedule()

    def _begin(self, parts: list[Part]) -> None:
        rng = self.world.rng
        for part in parts:
            request = part.request
            request.in_step = True
            self.queue.remove(request)
            if request.transfer and (part.end == request.length or rng.random() < 0.8):
                part.send_from, request.sent = request.sent, part.end
        self._num_steps += 1
        step = self.step = Step(self._num_steps, tuple(parts), len(self.workers))
        for worker in self.workers:
            worker.later(rng.randint(0, MS), worker.begin, step)
        self.scheduler.later(STEP_MAX, self._step_late, step)

    def _step_late(self, step: Step) -> None:
        if self.step is step:
            self.fail_step(step, "late")

    def fail_step(self, step: Step, why: str) -> None:
        """Something in a step went wrong for good: its requests end, its slots are given back."""
        if step.failed:
            return
        self.world.trace(f"{self.name} step {step.number} fails: {why}")
        step.failed = True
        for part in step.parts:
            part.request.failed = True
        for worker in self.workers:
            worker.later(0, worker.advance)

    def worker_done(self, worker: Worker, step: Step) -> None:
        """One worker has run all layers, or has given the step up."""
        step.workers_left -= 1
        if step.workers_left or self.step is not step:
            return
        self.step = None
        for part in step.parts:
            self._part_done(part)
        self.schedule()

    def _part_done(self, part: Part) -> None:
        request, rng = part.request, self.world.rng
        request.in_step = False
        if request.ended:
            self._forget(request)
            return
        if request.failed:
            self.abort(request)
            return
        request.computed = part.end
        self._commit(request)
        if self.world.happens(self.world.options.poison_rate):
            self._poison(request)
        if request.computed < request.length:
            self.queue.append(request)
            return
        delay = rng.choice((0, 5, 60)) * MS
        if request.transfer and rng.random() < self.await_rate:
            # Its blocks are kept until they are not needed for a redirect any more.
            deadline = self.world.clock.now + 1500 * MS
            event = ev.TransferAwaited(0, self.scheduler.ref, request.transfer, deadline)
            self.scheduler.ask(event, lambda answer: self._sent(request, delay, answer))
        else:
            self.scheduler.later(delay, self._finish, request)

    def _poison(self, request: Request) -> None:
        """A checksum did not fit: nobody shall read this block, and the request ends."""
        block = self.world.rng.choice(request.blocks)
        event = ev.BlocksPoisoned(0, self.scheduler.ref, (block,))
        self.scheduler.ask(event, lambda _: None)
        request.failed = True

    def _sent(self, request: Request, delay: int, answer: Answer) -> None:
        self.scheduler.later(delay, self._finish, request)
        good = answer is None or isinstance(answer, TransferOver)
        if not good and isinstance(answer, KvdError):
            good = answer.code in ("transfer_failed", "deadline_exceeded", "transfer_unknown")
        if not good:
            raise Violation("never", f"a producer's wait was answered with {answer}")

    def _finish(self, request: Request) -> None:
        self._end(request, aborted=False)

    def _commit(self, request: Request) -> None:
        size, rng = self.world.options.block_tokens, self.world.rng
        ends = list(range(request.committed + size, request.computed + 1, size))
        if request.computed == request.length and request.length % size and rng.random() < 0.3:
            ends.append(request.length)
        items = []
        for end in ends:
            start = (end - 1) // size * size
            block_hash = self.world.oracle.name_block(request.document, start, end)
            block = request.blocks[start // size]
            items.append(ev.CommitItem(block, block_hash, end - start, request.name))
            request.committed = start + size
        if items:
            event = ev.Committed(0, self.scheduler.ref, tuple(items))
            self.scheduler.ask(event, lambda answer: self._committed(request, answer))

    def _committed(self, request: Request, answer: Answer) -> None:
        if isinstance(answer, KvdError):
            raise Violation("never", f"commit refused with {answer}")
        if isinstance(answer, ItemStatuses):
            for code in answer.codes:
                if code not in COMMIT_CODES:
                    raise Violation("never", f"commit of {request.name}: {code}")
