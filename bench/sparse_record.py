"""Selections of the reference engine's decode, step after step, as traces for bench.sparse.

A prompt of real English is prefilled and continued greedily. What each indexer layer selects in a
step passes through a cache that notes it: the recording is of one request, a trace per layer. It
is the same every time on one machine and one torch build.

    python -m bench.sparse_record FILE.npz [--layer L] [--tokens N] [--new N] [--topk K]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from bench.sparse_traces import Ints, RecordedTrace
from engine_shim.reference.bytes_tokenizer import encode, long_text
from engine_shim.reference.cache import ResidentCache
from engine_shim.reference.config import ModelConfig
from engine_shim.reference.generate import decode, prefill
from engine_shim.reference.model import SparseModel

CHUNK: Final = 512
PADDING: Final = -1


@dataclass(frozen=True, slots=True)
class Recording:
    """What is decoded: new tokens after a prompt, one position in a step."""

    prompt: int = 4096
    new: int = 400
    topk: int = 128

    @property
    def context(self) -> int:
        """Tokens at the end."""
        return self.prompt + self.new

    def config(self) -> ModelConfig:
        """The demo's model with fewer layers: two indexers, the second on a deeper state."""
        return ModelConfig(
            num_layers=3, index_layers=(0, 2), index_topk=self.topk, max_positions=self.context
        )

    def run(self) -> Mapping[int, RecordedTrace]:
        """Decode, and return what each indexer layer selected in each step.

        Raises: ValueError naming what is out of range.
        """
        torch.set_num_threads(1)  # small products: more threads only wait for each other
        config = self.config()
        model, cache = SparseModel(config), RecordingCache(config, self.context)
        prompt = encode(long_text(self.prompt))
        prefill(model, cache, prompt, CHUNK)
        cache.start()
        decode(model, cache, prompt, self.new)
        return {layer: RecordedTrace(self.context, cache.steps(layer)) for layer in cache.layers}


class RecordingCache(ResidentCache):
    """A resident cache that notes what is selected, once it has been told to start."""

    def __init__(self, config: ModelConfig, max_tokens: int) -> None:
        """Allocate rows for `max_tokens` tokens in all layers."""
        super().__init__(config, max_tokens)
        self.layers = config.index_layers
        self._steps: dict[int, list[list[Ints]]] = {}

    def start(self) -> None:
        """Note the selections from here on, and forget those from before."""
        self._steps = {layer: [] for layer in self.layers}

    def steps(self, layer: int) -> Sequence[Sequence[Ints]]:
        """Return what each query of each step selected, ascending and without padding."""
        return self._steps[layer]

    def selected(self, layer: int, positions: Tensor) -> None:
        """Note a step of an indexer layer."""
        if self._steps:
            rows = positions.numpy().astype(np.int32)
            self._steps[layer].append([row[row != PADDING] for row in rows])


def save_trace(path: Path, trace: RecordedTrace) -> None:
    """Write a trace as an .npz file that `load_trace` reads; its padding is -1."""
    queries = max(len(step) for step in trace.steps)
    k = max(len(row) for step in trace.steps for row in step)
    rows = np.full((len(trace.steps), queries, k), PADDING, np.int32)
    for number, step in enumerate(trace.steps):
        for query, row in enumerate(step):
            rows[number, query, : len(row)] = row
    np.savez_compressed(path, selections=rows, context=np.int64(trace.context))


def main(argv: Sequence[str] | None = None) -> int:
    """Record one layer into a file."""
    usual = Recording()
    parser = argparse.ArgumentParser(description="record the selections of a decode")
    parser.add_argument("file", type=Path, metavar="FILE.npz", help="where the trace goes")
    parser.add_argument("--layer", type=int, default=0, help="indexer layer")
    parser.add_argument("--tokens", type=int, default=usual.prompt, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=usual.new, help="tokens decoded after it")
    parser.add_argument("--topk", type=int, default=usual.topk, help="rows that a query selects")
    arguments = parser.parse_args(argv)
    recording = Recording(arguments.tokens, arguments.new, arguments.topk)
    layers = recording.config().index_layers
    if arguments.file.suffix != ".npz":
        parser.error(f"FILE is {arguments.file}; give a name that ends in .npz")
    if arguments.layer not in layers:
        parser.error(f"--layer is {arguments.layer}; give one of {layers}")
    if arguments.new < 1:
        parser.error(f"--new is {arguments.new}; give 1 or more")
    save_trace(arguments.file, recording.run()[arguments.layer])
    return 0


if __name__ == "__main__":
    sys.exit(main())
