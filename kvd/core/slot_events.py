"""What can happen to one slot (past tense), and what must then be done (imperative).

The same event objects travel from the translated frame through the machine into `release.py`;
the machine uses the fields about blocks and peers, the release rule uses only the names.
"""

from __future__ import annotations

from kvd.core.holds import HoldKind, Truth
from kvd.core.ids import MemberRef, Owner, ReadId, SlotRef
from kvd.core.record import record


@record
class LoadSpec:
    """Blocks that a tenancy loads for one request, in order; `tokens` in all of them together."""

    request: str
    blocks: tuple[int, ...]
    tokens: int


@record
class SaveSpec:
    """One save that a tenancy starts.

    saver:  name of the SAVE hold, unique in the tenancy.
    blocks: target blocks, each reserved by the engine.
    tokens: for each block how many of its tokens are valid once the save has ended.
    requests: for each block whose it must still be (an abort may be seen before the save is
        announced, and block ids are used again); () for not checked.
    """

    saver: str
    blocks: tuple[int, ...]
    tokens: tuple[int, ...]
    requests: tuple[str, ...] = ()


@record
class ReadSpec:
    """One read that a tenancy offers.

    read:          its name (attempt 0).
    peer:          address of the kvd that executes it for the decode engine.
    end:           rows [read.start, end) of the transfer's tokens.
    device_blocks: the producer's block ids that hold these rows in the slot, in order.
    pool_blocks:   the pool blocks that the tenancy's save puts the same rows into, or ().
    """

    read: ReadId
    peer: str
    end: int
    device_blocks: tuple[int, ...] = ()
    pool_blocks: tuple[int, ...] = ()


# Steps --------------------------------------------------------------------------------------


@record
class StepOpened:
    """A member begins a step: each layer of it loads and saves these blocks, in its own slot.

    Once this was answered its copies may start without a further answer, those of a save once it
    was announced: the blocks are kept until the step is closed and all of them have ended (R11).

    number: above that of every earlier step of the member.
    saves:  of each layer: at most one save.
    """

    member: MemberRef
    number: int
    loads: tuple[LoadSpec, ...] = ()
    saves: tuple[SaveSpec, ...] = ()


@record
class StepClosed:
    """No copy of this step begins any more, and those that were refused have ended.

    Those that were not are known by name: the step ends with the last of them.
    """

    member: MemberRef
    number: int


# Events -------------------------------------------------------------------------------------


@record
class Acquired:
    """The engine began to use a free slot; its loads may start once this was answered.

    step: number of the open step whose loads these are, 0 when `loads` names them.
    """

    ref: SlotRef
    layer: int = -1
    loads: tuple[LoadSpec, ...] = ()
    step: int = 0


@record
class BadSum:
    """A loaded span whose checksum differs: the bytes in its block are not what was saved."""

    block: int
    expected: int
    got: int


@record
class LoadEnded:
    """The loads of a tenancy have ended: their source blocks are not read any more.

    ok:  what follows in the tenancy may be believed; not ok poisons it.
    bad: spans whose bytes were not those that had been saved; their blocks are poisoned. With ok
         the rows of other requests stand; those of their own are refused from here on.
    """

    ref: SlotRef
    ok: bool
    bad: tuple[BadSum, ...] = ()


@record
class Written:
    """The layer's KV is final: every save and read of the tenancy is armed now (R2).

    step: number of the open step whose saves these are, 0 when `saves` names them.
    """

    ref: SlotRef
    layer: int = -1
    saves: tuple[SaveSpec, ...] = ()
    reads: tuple[ReadSpec, ...] = ()
    step: int = 0


@record
class Computed:
    """Attention over the slot has ended."""

    ref: SlotRef
    ok: bool = True


@record
class SaveEnded:
    """A save ended; `tokens` per target block as in its SaveSpec, () = as announced.

    sums: checksum of each target block's span, u32 little endian, 0 for none; b"" = none at all.
    """

    ref: SlotRef
    saver: str
    ok: bool
    tokens: tuple[int, ...] = ()
    sums: bytes = b""


@record
class ReadClaimed:
    """A reader is ready to read and asks for its grant.

    claim: number of this claim in the reader's books; the grant repeats it, and a reader accepts
        no grant with another number (a late grant must not start a read it has given up).
    """

    ref: SlotRef
    read: ReadId
    executor: str
    claim: int = 0


@record
class ReadDeclined:
    """The reader will never claim this offer (its request is over)."""

    ref: SlotRef
    read: ReadId


@record
class ReadEnded:
    """A granted read ended."""

    ref: SlotRef
    read: ReadId
    executor: str
    ok: bool


@record
class Answered:
    """The executor of a doubted hold said what it knows."""

    ref: SlotRef
    kind: HoldKind
    owner: Owner
    truth: Truth


@record
class Fenced:
    """Asked for: the party of this hold can provably not touch the slot any more."""

    ref: SlotRef
    kind: HoldKind
    owner: Owner


@record
class Unfenceable:
    """Asked for: nobody can prove that the party of this hold is gone."""

    ref: SlotRef
    kind: HoldKind
    owner: Owner


@record
class ExecutorDied:
    """A process is proven dead: whatever it executed has stopped."""

    ref: SlotRef
    executor: str


@record
class Poisoned:
    """The tenancy's data is not valid (a load or the computation failed)."""

    ref: SlotRef


@record
class Abandoned:
    """The slot's owner is gone: what nobody has claimed is revoked."""

    ref: SlotRef


@record
class Ticked:
    """Time passed."""

    ref: SlotRef


SlotEvent = (
    Acquired
    | LoadEnded
    | Written
    | Computed
    | SaveEnded
    | ReadClaimed
    | ReadDeclined
    | ReadEnded
    | Answered
    | Fenced
    | Unfenceable
    | ExecutorDied
    | Poisoned
    | Abandoned
    | Ticked
)


# Effects ------------------------------------------------------------------------------------


@record
class Release:
    """The last hold is gone: publish the next epoch as free."""

    ref: SlotRef


@record
class OfferRead:
    """Tell the reader's kvd that it may claim."""

    ref: SlotRef
    read: ReadId


@record
class GrantRead:
    """Tell the reader that it may read now."""

    ref: SlotRef
    read: ReadId
    executor: str
    claim: int = 0


@record
class RedirectRead:
    """The hold is lifted; pin the pool span in this very transition and offer that instead.

    read: the name to offer it under: the old one if it was never granted, else the next attempt.
    """

    ref: SlotRef
    read: ReadId


@record
class FinishRead:
    """The rows have arrived."""

    ref: SlotRef
    read: ReadId


@record
class FailRead:
    """The hold is lifted and the rows will not come: the transfer fails, nothing else does."""

    ref: SlotRef
    read: ReadId
    why: str


@record
class SettleSave:
    """A save has ended: mark its spans, or poison its blocks."""

    ref: SlotRef
    saver: str
    ok: bool


@record
class PoisonTenancy:
    """Whatever was or will be copied out of this tenancy must not become readable."""

    ref: SlotRef


@record
class AskTruth:
    """Ask the executor what became of this hold."""

    ref: SlotRef
    kind: HoldKind
    owner: Owner
    executor: str


@record
class AskFence:
    """Have the party of this hold stopped, or proven dead."""

    ref: SlotRef
    kind: HoldKind
    owner: Owner
    executor: str


@record
class ReportQuarantine:
    """The hold cannot be fenced: show it, rebind the slot's layers, end who depends on it."""

    ref: SlotRef
    kind: HoldKind
    owner: Owner


@record
class Ignore:
    """An expected race or an illegal event: nothing changed; `why` is counted."""

    ref: SlotRef
    why: str


SlotEffect = (
    Release
    | OfferRead
    | GrantRead
    | RedirectRead
    | FinishRead
    | FailRead
    | SettleSave
    | PoisonTenancy
    | AskTruth
    | AskFence
    | ReportQuarantine
    | Ignore
)
