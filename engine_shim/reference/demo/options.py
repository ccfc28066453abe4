"""The demo's command line: everything that can be wrong with it is said before anything starts."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Final

from engine_shim.reference.bytes_tokenizer import encode, encode_file, long_text, longest_text
from engine_shim.reference.config import SEED_MAX
from engine_shim.reference.decode_worker import default_hot_rows
from engine_shim.reference.demo.run import DemoOptions
from engine_shim.reference.serve import model_config

TOKENS: Final = 16384
LONG_TOKENS: Final = 32768
MINIMUM: Final = 1024


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        "python -m engine_shim.reference.demo",
        description="Two kvds, a prefill and a decode engine, one long text: prefill on a few "
        "layer buffers, hand-off layer by layer, decode with hot buffers; then a prefix hit, and a "
        "killed engine. Exits 1 when a token differs from the resident run.",
    )
    default = "(default: %(default)s)"
    length = made.add_mutually_exclusive_group()
    length.add_argument(
        "--tokens",
        type=int,
        help=f"length of the text, {MINIMUM} or more (default: {TOKENS}, or all of --prompt-file)",
    )
    length.add_argument("--long", action="store_true", help=f"the same as --tokens {LONG_TOKENS}")
    made.add_argument(
        "--prompt-file", type=_path, help="a text of your own, UTF-8 (default: a built-in one)"
    )
    made.add_argument("--new", type=int, default=64, help=f"tokens to generate {default}")
    made.add_argument("--width", type=int, default=4, help=f"positions of a decode step {default}")
    made.add_argument("--model", choices=("tiny", "demo"), default="demo", help=f"size {default}")
    made.add_argument("--seed", type=int, default=0, help=f"of the model's weights {default}")
    made.add_argument("--threads", type=int, default=1, help=f"of torch, in each process {default}")
    made.add_argument(
        "--out", type=_path, default=Path("demo-out"), help=f"where run.json goes {default}"
    )
    return made


def options_of(args: argparse.Namespace) -> tuple[DemoOptions, str]:
    """What to run, and what to say about the length of the text, '' for nothing.

    Raises: ValueError that names the option.
    """
    for name in ("new", "threads"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; give 1 or more")
    if not 0 <= args.seed <= SEED_MAX:
        raise ValueError(f"--seed is {args.seed}; give 0 to {SEED_MAX}")
    # A decode step reads through the hot buffer, which must have room for each of its positions.
    widest = default_hot_rows(model_config(args.model, args.seed, MINIMUM))
    if not 1 <= args.width <= widest:
        raise ValueError(f"--width is {args.width}; give 1 to {widest} to the {args.model} model")
    tokens, said = _text_of(args)
    small = {"chunk": 256, "block_tokens": 64, "buffers": 2} if args.model == "tiny" else {}
    options = DemoOptions(
        tokens=tuple(tokens),
        num_new=args.new,
        model=args.model,
        seed=args.seed,
        width=args.width,
        threads=args.threads,
        **small,
    )
    return options, said


def make_out(path: Path) -> None:
    """Make the directory for the figures, if it is not there.

    Raises: ValueError that names the option when they cannot be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or "unknown error"
        raise ValueError(f"--out {path} cannot be a directory ({reason}); give another") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"--out {path} cannot be written to; give another directory")


def _text_of(args: argparse.Namespace) -> tuple[list[int], str]:
    count = LONG_TOKENS if args.long else args.tokens
    if count is not None and count < MINIMUM:
        raise ValueError(f"--tokens is {count}; give {MINIMUM} or more")
    if args.prompt_file is None:
        count = count or TOKENS
        if count > longest_text():
            raise ValueError(
                f"--tokens is {count}; give {MINIMUM} to {longest_text()}, the built-in text is "
                "no longer, or a --prompt-file"
            )
        return encode(long_text(count)), ""
    tokens = encode_file(args.prompt_file)
    found = f"{args.prompt_file} has {len(tokens)} tokens"
    if count is None or count == len(tokens):
        return tokens, ""
    if count > len(tokens):
        return tokens, f"{found}, fewer than {count}: all of them are used"
    return tokens[:count], f"{found}: the first {count} are used"


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)
