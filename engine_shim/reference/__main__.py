"""`python -m engine_shim.reference`: generate from a prompt with everything resident."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from engine_shim.reference.bytes_tokenizer import decode as to_text
from engine_shim.reference.bytes_tokenizer import encode, encode_file, long_text
from engine_shim.reference.cache import ResidentCache
from engine_shim.reference.config import ModelConfig, demo, tiny
from engine_shim.reference.drafts import PromptLookup
from engine_shim.reference.generate import decode, prefill
from engine_shim.reference.model import SparseModel
from engine_shim.reference.threads import configure_threads


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine_shim.reference",
        description="Generate greedily with the reference model, all KV rows resident, and print "
        "how fast. The weights are random: the text it makes is noise, the same noise every time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="prompt text")
    prompt.add_argument("--prompt-file", type=Path, help="UTF-8 file to take the prompt from")
    prompt.add_argument(
        "--prompt-tokens", type=int, default=2048, help="length of the built-in English prompt"
    )
    parser.add_argument("--model", choices=("tiny", "demo"), default="demo", help="model size")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to generate, 1 or more")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens in one prefill step")
    parser.add_argument("--width", type=int, default=1, help="positions in one decode step")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    return parser


def _prompt(arguments: argparse.Namespace) -> list[int]:
    if arguments.prompt is not None:
        return encode(arguments.prompt)
    if arguments.prompt_file is not None:
        return encode_file(arguments.prompt_file)
    return encode(long_text(arguments.prompt_tokens))


def _run(arguments: argparse.Namespace) -> None:
    prompt = _prompt(arguments)
    if not prompt:
        raise ValueError("prompt is empty; give at least one character")
    for name in ("new_tokens", "chunk", "width"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"{name} is {getattr(arguments, name)}; give 1 or more")
    configure_threads(arguments.threads)
    config = tiny(arguments.seed) if arguments.model == "tiny" else demo(arguments.seed)
    total = len(prompt) + arguments.new_tokens
    if total > config.max_positions:
        raise ValueError(
            f"prompt and new_tokens are {total} tokens together; "
            f"give {config.max_positions} or less to the {arguments.model} model"
        )
    model = SparseModel(config)
    cache = ResidentCache(config, total)
    began = time.perf_counter()
    first = int(prefill(model, cache, prompt, arguments.chunk).argmax())
    filled = time.perf_counter()
    drafter = PromptLookup() if arguments.width > 1 else None
    known = [*prompt, first]
    done = decode(model, cache, known, arguments.new_tokens - 1, drafter, arguments.width)
    _report(config, prompt, [first, *done.tokens], filled - began, time.perf_counter() - filled)
    if arguments.width > 1:
        print(f"drafts    {done.num_accepted} accepted, {done.num_rejected} rejected")


def _report(
    config: ModelConfig, prompt: list[int], new: list[int], prefill_s: float, decode_s: float
) -> None:
    cache_mib = (len(prompt) + len(new)) * config.token_bytes / 2**20
    print(f"text      {to_text(new)!r}")
    print(f"cache     {config.token_bytes} bytes per token, {cache_mib:.1f} MiB in all")
    print(f"prefill   {len(prompt)} tokens, {len(prompt) / prefill_s:.1f} tok/s")
    if len(new) > 1:
        print(f"decode    {len(new)} tokens, {(len(new) - 1) / decode_s:.1f} tok/s")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 after one sentence about what is wrong with it."""
    arguments = _parser().parse_args(argv)
    try:
        _run(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
