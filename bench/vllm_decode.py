"""Decode in a real vLLM with main KV in a region of kvd: are the tokens equal, is loading hidden?

Three engines, one after the other, say the same prompts on: with all KV on the device, with hot
buffers and attention behind the loads, and with `overlap_attention`. Tokens must be equal. The
hidden share is 1 - (time that attention waited for rows) / (time of the copies), by the engine's
own figures, from one step of 16.

    python -m bench.vllm_decode --python ENVIRONMENT/bin/python [--json FILE] [--gate]

The engines need an environment with vLLM; `make bench-vllm` makes it and gives it. What is on the
CPU stands for a device: a copy there takes a core from nobody only where there is another one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.report import Better, Row, argument_parser, compare, finish, measure
from bench.vllm_engine import MARK
from engine_shim.reference.demo.leash import popen
from engine_shim.reference.demo.processes import OwnDaemon, clean_environment
from engine_shim.vllm.demo.server import OWN_FOLDERS, VARIABLES

ROOT: Final = Path(__file__).resolve().parents[1]
ROUNDS: Final = ((2000,), (2000, 1500, 1000))
"""Lengths of prompts that decode together: alone, nothing of another request hides the loads."""
NEW: Final = 56
SLOTS: Final = 512
"""Rows of a hot buffer in each layer: twice what a query selects."""
HIDDEN_MIN: Final = 0.8
SECONDS_MAX: Final = 300.0
LOWER: Final = Better.LOWER
MODES: Final = ("resident", "ordered", "overlapped")


class EngineFailed(RuntimeError):
    """An engine did not answer; the text has the end of what it wrote."""


def run_engine(python: str, folder: Path, arguments: Sequence[str], order: object) -> str:
    """Run `bench.vllm_engine`, and return what it wrote. Raises: EngineFailed."""
    environment = clean_environment() | dict(VARIABLES) | {"PYTHONPATH": str(ROOT)}
    environment |= dict.fromkeys(OWN_FOLDERS, str(folder))
    environment |= {"KVD_CPU_SPARSE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    process = popen(
        [python, "-m", "bench.vllm_engine", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=ROOT,
    )
    try:
        said, _ = process.communicate(json.dumps(order).encode(), timeout=SECONDS_MAX)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    text = said.decode(errors="replace")
    if process.returncode != 0:
        what = f"{python} -m bench.vllm_engine {arguments[0]} ended with {process.returncode}"
        raise EngineFailed(f"{what}; give --python of an environment with vLLM\n{text[-2000:]}")
    return text


def decode(python: str, folder: Path, kvd: OwnDaemon, mode: str) -> list[Mapping[str, Any]]:
    """What an engine of one mode said in each round. Raises: EngineFailed."""
    arguments: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": max(map(max, ROUNDS)) + 256,
        "max_num_seqs": max(map(len, ROUNDS)),
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 256 << 20,
        "seed": 0,
    }
    if mode != "resident":
        sparse = {
            "enabled": True,
            "topk_buffer_size": SLOTS,
            "dram_size_per_dp_GB": 0.125,
            "overlap_attention": mode == "overlapped",
        }
        arguments["kv_transfer_config"] = {
            "kv_connector": "KvdConnector",
            "kv_connector_module_path": "engine_shim.vllm",
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": {
                "kvd_runtime_dir": str(kvd.runtime_dir),
                "sparse_kv_offload_config": sparse,
            },
        }
    order = {"model": str(folder), "arguments": arguments, "rounds": ROUNDS, "new": NEW}
    text = run_engine(python, folder, ["decode"], order)
    (answer,) = (line for line in text.splitlines() if line.startswith(MARK))
    return list(json.loads(answer.removeprefix(MARK)))


def rows_of(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Row]:
    """The figures of all engines."""
    rows = []
    for at, lengths in enumerate(ROUNDS):
        resident = found["resident"][at]
        for mode in MODES[1:]:
            mine = found[mode][at]
            case = f"{len(lengths)} decode, {mode}"
            equal = float(mine["tokens"] == resident["tokens"])
            rows += [
                measure(case, "tokens equal", [equal], unit="", target=1.0),
                *_buffer_rows(case, mine["figures"]),
                compare(case, "step", mine["steps"], resident["steps"], unit="s", better=LOWER),
            ]
    return rows


def _buffer_rows(case: str, figures: Mapping[str, float]) -> list[Row]:
    """What the hot buffers did, for one step of one request."""
    used = figures["hits"] + figures["misses"] + figures["scratch"]
    hidden = max(0.0, 1 - figures["waited_us"] / figures["copied_us"])
    times = {"copies": "copied_us", "waited": "waited_us", "books": "managed_us"}
    return [
        measure(case, "hit rate", [figures["hits"] / used], unit=""),
        measure(case, "hidden share", [hidden], unit="", target=HIDDEN_MIN),
        *(
            measure(case, f"{name}, a step", [figures[key] / figures["timed"]], unit="us")
            for name, key in times.items()
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; returns the exit code."""
    parser = argument_parser((__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter of an environment with vLLM and kvd"
    )
    arguments = parser.parse_args(argv)
    settings = ("pool.size=16MiB", "pool.huge_pages=off", "regions.huge_pages=off")
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as name, OwnDaemon(*settings) as kvd:
        folder = Path(name)
        try:
            run_engine(arguments.python, folder, ["model", name], None)
            found = {mode: decode(arguments.python, folder, kvd, mode) for mode in MODES}
        except EngineFailed as failure:
            print(f"bench: {failure}", file=sys.stderr)
            return 2
    return finish("vllm_decode", rows_of(found), arguments)


if __name__ == "__main__":
    sys.exit(main())
