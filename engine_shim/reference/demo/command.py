"""What the demo says and writes, and how it ends."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from engine_shim.reference.demo.interrupts import Interrupts, run_until_interrupted
from engine_shim.reference.demo.options import make_out, options_of, parser
from engine_shim.reference.demo.processes import EngineEnded
from engine_shim.reference.demo.run import (
    Demo,
    DemoFailed,
    DemoOptions,
    DemoResult,
    Request,
    hit_rate,
)
from engine_shim.reference.demo.show import Show, size


def document_of(options: DemoOptions, result: DemoResult) -> dict[str, object]:
    """Every figure, `tokens_equal` first."""
    prefill, decode = result.prefill, result.decode
    ready, hot = result.prefill_ready, result.decode_ready
    assert ready is not None
    assert hot is not None
    transfer = prefill["load_s"] + prefill["save_s"]
    exposed = min(prefill["exposed_s"], transfer)
    return {
        "tokens_equal": result.tokens_equal,
        "logits_equal": result.logits_equal,
        "tokens": len(options.tokens),
        "new_tokens": options.num_new,
        "invariant_samples": result.samples,
        "invariant_problems": result.problems,
        "hit_tokens": {r.name: r.prefilled.hit_tokens for r in result.requests},
        "prefill_seconds": {r.name: r.prefilled.seconds for r in result.requests},
        "decode_seconds": {r.name: r.decoded.seconds for r in result.requests},
        "decode_steps": {r.name: r.decoded.num_steps for r in result.requests},
        "drafts_accepted": {r.name: r.decoded.num_accepted for r in result.requests},
        "prefill_device_bytes": ready.device_bytes,
        "prefill_resident_bytes": ready.resident_bytes,
        "decode_device_bytes": hot.device_bytes,
        "decode_resident_bytes": hot.resident_bytes,
        "transfer_seconds": transfer,
        "exposed_seconds": exposed,
        "hidden_seconds": transfer - exposed,
        "loaded_bytes": prefill["loaded_bytes"],
        "saved_bytes": prefill["saved_bytes"],
        "hot_hit_rate": hit_rate(decode),
        "hot_merged": decode["hot_merged"],
        "hot_merged_misses": decode["hot_merged_misses"],
        "hot_overlap": decode["hot_overlap"],
        "hot_managed_us": decode["hot_managed_us"],
        "hot_requests": {r.name: hot_figures(r) for r in result.requests},
        "pool": [status["pool"] for status in result.status],
        "process": [status["process"] for status in result.status],
        "seconds": result.seconds,
    }


def hot_figures(request: Request) -> dict[str, float]:
    """What hot buffers did for one request."""
    names = ("hot_merged", "hot_merged_misses", "hot_overlap", "hot_managed_us")
    figures = {name: request.decoded.figures[name] for name in names}
    return {"hot_hit_rate": request.hot_hit_rate, **figures}


def table_rows(document: dict[str, object], result: DemoResult) -> list[tuple[str, str, str]]:
    """What people look at."""
    ready, hot = result.prefill_ready, result.decode_ready
    assert ready is not None
    assert hot is not None
    pool = result.status[0]["pool"]
    assert isinstance(pool, dict)
    hits = {request.name: request.prefilled.hit_tokens for request in result.requests}
    exposed, hidden = document["exposed_seconds"], document["hidden_seconds"]
    good = "yes" if result.tokens_equal else "NO"
    bits = "every logit bit too" if all(result.logits_equal) else "logits differ in rounding"
    return [
        ("tokens equal to the resident run", good, bits),
        (
            "prefill buffers",
            size(ready.device_bytes),
            f"resident would take {size(ready.resident_bytes)}",
        ),
        (
            "decode device memory",
            size(hot.device_bytes),
            f"resident would take {size(hot.resident_bytes)}",
        ),
        (
            "pool in use",
            size(pool["bytes"]["total"] - pool["bytes"]["free"]),
            f"of {size(pool['configured_bytes'])}",
        ),
        ("transfer hidden behind compute", f"{hidden:.2f} s", f"exposed: {exposed:.2f} s"),
        (
            "rows found in the hot buffer",
            f"{100 * float(str(document['hot_hit_rate'])):.1f} %",
            f"{int(result.decode['hot_merged'])} selections of draft positions merged, "
            f"{int(result.decode['hot_merged_misses'])} of them misses",
        ),
        (
            "loads of rows hidden behind compute",
            f"{100 * result.decode['hot_overlap']:.0f} %",
            f"{result.decode['hot_managed_us']:.0f} us of selection and bookkeeping for a step of "
            "an indexer",
        ),
        ("prefix hit, second request", f"{hits['second']} tokens", "the shared beginning"),
        ("after kill -9 of the engine", f"{hits['third']} tokens", "found again in kvd's pool"),
        (
            "status samples without a contradiction",
            str(result.samples - len(result.problems)),
            f"of {result.samples}",
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    args = parser().parse_args(argv)
    return run_until_interrupted(lambda interrupts: _run(args, Show(), interrupts))


def _run(args: argparse.Namespace, show: Show, interrupts: Interrupts) -> int:
    try:
        options, said = options_of(args)
        make_out(args.out)
    except ValueError as error:
        show.failure(str(error))
        return 2
    if said:
        show.fact(said)
    try:
        result = Demo(options, show, interrupts).run()
        document = document_of(options, result)
        path = args.out / "run.json"
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except (DemoFailed, EngineEnded, RuntimeError, OSError) as error:
        show.failure(str(error))
        return 1
    show.table("kvd demo", table_rows(document, result))
    show.fact(f"all figures: {path}; {result.seconds:.0f} s in all")
    for problem in result.problems:
        show.failure(problem)
    return 0 if result.tokens_equal and not result.problems else 1
