"""What the demo says and writes, and how it ends."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from engine_shim.reference.demo.interrupts import Interrupts, run_until_interrupted
from engine_shim.reference.demo.options import make_out
from engine_shim.reference.demo.show import Show, size
from engine_shim.vllm.demo.options import options_of, parser
from engine_shim.vllm.demo.run import BLOCK_TOKENS, Demo, DemoFailed, DemoOptions, DemoResult
from engine_shim.vllm.demo.server import ServerFailed

_BLOCKS: Final = re.compile(r"(\d+) blocks instead of (\d+)")


def document_of(options: DemoOptions, result: DemoResult) -> dict[str, Any]:
    """Every figure, `tokens_equal` first."""
    assert result.cold is not None
    assert result.hit is not None
    assert result.stock is not None
    blocks = _BLOCKS.search(result.engine.get("offload", ""))
    return {
        "tokens_equal": result.tokens_equal,
        "tokens": len(options.text),
        "new_tokens": options.num_new,
        "hit_tokens": result.hit.num_cached,
        "ttft_cold_seconds": result.cold.first_s,
        "ttft_hit_seconds": result.hit.first_s,
        "ttft_stock_seconds": result.stock.first_s,
        "blocks_rolling": int(blocks[1]) if blocks else None,
        "blocks_stock": int(blocks[2]) if blocks else None,
        "device_bytes": options.device_bytes,
        "stock_device_bytes": options.stock_bytes,
        "offload": result.engine.get("offload"),
        "merged": result.merge_line,
        "first_server_was_killed": options.kills,
        "start_seconds": result.start_s,
        "cold": asdict(result.cold),
        "hit": asdict(result.hit),
        "stock": asdict(result.stock),
        "pool": result.pool,
        "seconds": result.seconds,
    }


def table_rows(options: DemoOptions, document: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What people look at."""
    good = "yes" if document["tokens_equal"] else "NO"
    end = "kill -9" if options.kills else "SIGTERM"
    rolling, stock = document["blocks_rolling"], document["blocks_stock"]
    return [
        ("tokens equal in all three servers", good, f"{options.num_new} tokens, greedy"),
        (
            "first token, cold",
            f"{document['ttft_cold_seconds']:.2f} s",
            f"stock vLLM without kvd: {document['ttft_stock_seconds']:.2f} s",
        ),
        (
            "first token, from the pool",
            f"{document['ttft_hit_seconds']:.2f} s",
            f"another process, after {end} of the first",
        ),
        (
            "tokens found in the pool",
            str(document["hit_tokens"]),
            f"of {document['tokens']}",
        ),
        (
            f"blocks in {size(options.device_bytes)}",
            str(rolling),
            f"without sharing buffers: {stock}",
        ),
        (
            "tokens that fit",
            str((rolling - 1) * BLOCK_TOKENS) if rolling else "?",
            f"without sharing buffers: {(stock - 1) * BLOCK_TOKENS if stock else '?'}; the text "
            f"needs {options.num_blocks * BLOCK_TOKENS}",
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    args = parser().parse_args(argv)
    return run_until_interrupted(lambda interrupts: _run(args, Show(), interrupts))


def _run(args: argparse.Namespace, show: Show, interrupts: Interrupts) -> int:
    try:
        options = options_of(args)
        make_out(args.out)
    except ValueError as error:
        show.failure(str(error))
        return 2
    try:
        result = Demo(options, show, interrupts).run()
        document = document_of(options, result)
        path = args.out / "vllm.json"
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except (DemoFailed, ServerFailed, RuntimeError, OSError, subprocess.SubprocessError) as error:
        show.failure(str(error))
        return 1
    show.table("kvd in vLLM", table_rows(options, document))
    show.fact(f"all figures: {path}; {result.seconds:.0f} s in all")
    if not result.tokens_equal:
        show.failure("the servers gave different tokens")
    elif not result.is_good:
        show.failure("the second server found nothing in the pool, or another one found something")
    return 0 if result.is_good else 1
