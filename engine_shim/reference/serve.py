"""One rank of a reference engine as a process: `python -m engine_shim.reference.serve`.

Rank 0 reads orders from standard input and writes news to standard output; other ranks follow rank
0. The end of standard input ends the engine.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from engine_shim.client import KvdRefused
from engine_shim.device import DeviceError
from engine_shim.reference import orders as od
from engine_shim.reference.collective import Collective, GlooCollective, SingleProcess
from engine_shim.reference.config import ModelConfig, demo, tiny
from engine_shim.reference.decode_worker import DecodeOptions, DecodeWorker
from engine_shim.reference.prefill_worker import PrefillOptions, PrefillWorker
from engine_shim.reference.rank_group import RankGroup
from engine_shim.reference.threads import configure_threads
from engine_shim.steps import StepFailed


class Worker(Protocol):
    """A rank that is put together."""

    def ready(self) -> od.Ready:
        """What to say once it is."""

    def handle(self, order: od.Order, say: od.Say) -> None:
        """Carry out one order of rank 0.

        Raises: StepFailed, KvdRefused, DeviceError, ValueError when it cannot be done.
        """

    def follow(self) -> None:
        """Be another rank until the engine ends."""

    def close(self) -> None:
        """Give everything back."""


def sayer(out: BinaryIO) -> od.Say:
    """Writes news as lines."""
    lines = od.Lines()

    def say(news: od.News) -> None:
        out.write(lines.write(news))
        out.flush()

    return say


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        "python -m engine_shim.reference.serve",
        description="A rank of a reference engine. Orders come as JSON lines on standard input.",
    )
    made.add_argument("role", choices=("prefill", "decode"))
    made.add_argument("--engine", required=True, help="name of the engine")
    made.add_argument("--runtime-dir", default="", help="of its kvd")
    made.add_argument("--model", choices=("tiny", "demo"), default="demo")
    made.add_argument("--seed", type=int, default=0, help="of the weights")
    made.add_argument("--max-tokens", type=int, default=32768, help="longest sequence")
    made.add_argument("--block-tokens", type=int, default=128)
    made.add_argument("--chunk", type=int, default=2048, help="tokens of a prefill step")
    made.add_argument("--buffers", type=int, default=3, help="buffers that layers share (prefill)")
    made.add_argument("--resident", action="store_true", help="a buffer for every layer (prefill)")
    made.add_argument("--lookahead", type=int, default=1, help="layers that loads run ahead")
    made.add_argument("--hot-rows", type=int, default=0, help="rows of a hot buffer, 0 = 2 x top-k")
    made.add_argument("--max-width", type=int, default=4, help="positions of a decode step")
    made.add_argument("--reads", choices=("native", "torch"), default="native", help="(decode)")
    made.add_argument("--kv-port", type=int, default=0, help="where kvd listens (decode)")
    made.add_argument("--rank", type=int, default=0)
    made.add_argument("--tp-size", type=int, default=1)
    made.add_argument("--group", type=Path, help="directory where the ranks meet (tp-size > 1)")
    made.add_argument("--threads", type=int, default=1, help="of torch")
    return made


def model_config(name: str, seed: int, max_tokens: int) -> ModelConfig:
    """The named model with room for so many positions."""
    base = tiny(seed) if name == "tiny" else demo(seed)
    return replace(base, max_positions=max(base.max_positions, max_tokens))


def make_worker(args: argparse.Namespace) -> Worker:
    """Put the rank together.

    Raises: KvdRefused, DeviceError, ValueError.
    """
    config = model_config(args.model, args.seed, args.max_tokens)
    collective: Collective = SingleProcess()
    group = RankGroup.alone()
    if args.tp_size > 1:
        if args.group is None:
            raise ValueError("--tp-size > 1 needs --group, the same directory for all ranks")
        door = args.group / "orders.sock"
        store = f"file://{args.group.resolve()}/ranks"
        collective = GlooCollective(store, args.rank, args.tp_size)
        group = RankGroup.lead(door, args.tp_size) if args.rank == 0 else RankGroup.join(door)
    if args.role == "prefill":
        return PrefillWorker(config, _prefill_options(args), collective, group)
    return DecodeWorker(config, _decode_options(args), collective, group)


def _prefill_options(args: argparse.Namespace) -> PrefillOptions:
    return PrefillOptions(
        engine=args.engine,
        runtime_dir=args.runtime_dir,
        max_tokens=args.max_tokens,
        block_tokens=args.block_tokens,
        chunk=args.chunk,
        num_shared=args.buffers,
        independent="all" if args.resident else (0,),
        lookahead=args.lookahead,
    )


def _decode_options(args: argparse.Namespace) -> DecodeOptions:
    return DecodeOptions(
        engine=args.engine,
        runtime_dir=args.runtime_dir,
        max_tokens=args.max_tokens,
        block_tokens=args.block_tokens,
        hot_rows=args.hot_rows,
        max_width=args.max_width,
        reads=args.reads,
        kv_port=args.kv_port,
    )


def serve(worker: Worker, orders: BinaryIO, say: od.Say) -> None:
    """Carry out orders until there are no more, or one says stop."""
    lines = od.Lines()
    for line in orders:
        try:
            order = lines.order(line)
        except msgspec.DecodeError as error:
            say(od.Failed("", "order_malformed", str(error)))
            continue
        if isinstance(order, od.Stop):
            return
        request = getattr(order, "request", "")
        try:
            worker.handle(order, say)
        except StepFailed as failure:
            say(od.Failed(request, failure.code, failure.detail))
        except KvdRefused as refusal:
            say(od.Failed(request, refusal.code, f"{refusal.what} {refusal.remedy}".strip()))
        except DeviceError as error:
            say(od.Failed(request, str(error.code), error.detail))
        except ValueError as error:
            say(od.Failed(request, "order_refused", str(error)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; returns the exit code."""
    args = parser().parse_args(argv)
    configure_threads(args.threads)
    try:
        worker = make_worker(args)
    except (KvdRefused, DeviceError, ValueError, OSError) as error:
        print(f"{args.engine} rank {args.rank}: {error}", file=sys.stderr)
        return 1
    try:
        if args.rank > 0:
            worker.follow()
            return 0
        # Libraries print to fd 1: news get a copy of it, and fd 1 becomes standard error.
        out = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        say = sayer(out)
        say(worker.ready())
        serve(worker, sys.stdin.buffer, say)
    finally:
        worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
