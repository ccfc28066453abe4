"""The demo's command line: everything that can be wrong with it is said before anything starts."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Final

from engine_shim.reference.bytes_tokenizer import long_text, longest_text
from engine_shim.vllm.demo.model import LENGTH_MAX
from engine_shim.vllm.demo.run import DemoOptions

TOKENS: Final = 6144
MINIMUM: Final = 1024
NEW_MAX: Final = 256
BUFFERS_MAX: Final = 8
SEED_MAX: Final = 2**32 - 1


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        "python -m engine_shim.vllm.demo",
        description="One kvd and vLLM servers with the OpenAI API, one after the other: a long "
        "text on a few layer buffers; the server is killed; the next one finds the text in kvd's "
        "pool; stock vLLM without kvd says the same. Exits 1 when a token differs, or nothing was "
        "found.",
    )
    default = "(default: %(default)s)"
    made.add_argument(
        "--tokens",
        type=int,
        default=TOKENS,
        help=f"length of the text, {MINIMUM} or more {default}",
    )
    made.add_argument("--new", type=int, default=32, help=f"tokens to generate {default}")
    made.add_argument(
        "--buffers", type=int, default=3, help=f"that all layers but the first share {default}"
    )
    made.add_argument("--seed", type=int, default=0, help=f"of the model's weights {default}")
    made.add_argument("--threads", type=int, default=1, help=f"of each server {default}")
    made.add_argument(
        "--kill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=f"end the first server with kill -9, else with SIGTERM {default}",
    )
    made.add_argument(
        "--python",
        default=sys.executable,
        help="interpreter of an environment with vLLM and kvd (default: the one that runs this)",
    )
    made.add_argument(
        "--out", type=_path, default=Path("demo-out"), help=f"where vllm.json goes {default}"
    )
    return made


def options_of(args: argparse.Namespace) -> DemoOptions:
    """What to run.

    Raises: ValueError that names the option.
    """
    for name, least, most in (
        ("new", 1, NEW_MAX),
        ("buffers", 1, BUFFERS_MAX),
        ("seed", 0, SEED_MAX),
        ("threads", 1, os.cpu_count() or 1),
        ("tokens", MINIMUM, min(longest_text(), LENGTH_MAX - NEW_MAX)),
    ):
        value = getattr(args, name)
        if not least <= value <= most:
            raise ValueError(f"--{name} is {value}; give {least} to {most}")
    python = shutil.which(args.python)
    if python is None:
        raise ValueError(f"--python {args.python} is no program; give an interpreter with vLLM")
    return DemoOptions(
        text=long_text(args.tokens),
        num_new=args.new,
        buffers=args.buffers,
        seed=args.seed,
        threads=args.threads,
        kills=args.kill,
        python=python,
    )


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)
