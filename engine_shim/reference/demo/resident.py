"""The run that everything is compared with: the same model, all rows resident, one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine_shim.reference.cache import ResidentCache
from engine_shim.reference.config import ModelConfig
from engine_shim.reference.generate import decode
from engine_shim.reference.model import SparseModel
from engine_shim.reference.native_reads import NativeResidentCache


@dataclass(frozen=True, slots=True)
class ResidentRun:
    """What the resident model generated."""

    tokens: list[int]
    logits_digest: str


def run_resident(
    config: ModelConfig,
    tokens: Sequence[int],
    num_new: int,
    chunk: int,
    progress: Callable[[int, int], None],
    *,
    native: bool,
) -> ResidentRun:
    """Prefill in the same chunks, decode one position at a time.

    native: read by native operations, as the decode engine does.
    """
    model = SparseModel(config)
    cache = ResidentCache(config, len(tokens) + num_new)
    for start in range(0, len(tokens), chunk):
        model.forward(torch.tensor(tokens[start : start + chunk]), start, cache)
        progress(min(start + chunk, len(tokens)), len(tokens))
    if native:
        cache = NativeResidentCache(cache, 1)
    decoded = decode(model, cache, tokens, num_new)
    return ResidentRun(decoded.tokens, decoded.logits_digest)
