"""Block hashes: chained sha256 over token ids, computed where the tokens are.

A block's hash covers all tokens up to its end, so equal hashes mean equal prefixes. The chain
starts from a constant that depends on nothing: models, tenants and layouts are told apart by the
namespace that kvd puts beside the hash.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

HASH_BYTES: Final = 32
_ROOT: Final = hashlib.sha256(b"kvd reference engine block hash v1").digest()
_PROBE_TOKENS: Final = tuple(range(64))
_PROBE_BLOCK_TOKENS: Final = 16
_MAX_TOKEN: Final = 2**32 - 1


def block_hashes(tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Return the hashes of the full blocks at the front of a request.

    Args:    tokens: token ids, each 0 to 2**32 - 1.
             block_tokens: tokens in a block, 1 or more.
    Returns: one 32-byte hash per full block; a partial last block has none.
    Raises:  ValueError naming what is out of range.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens}; give 1 or more")
    hashes: list[bytes] = []
    parent = _ROOT
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        parent = hashlib.sha256(parent + _packed(tokens[end - block_tokens : end])).digest()
        hashes.append(parent)
    return hashes


def hash_probe() -> bytes:
    """Return the 32-byte hash of a fixed token list: two engines that agree on it hash alike."""
    return block_hashes(_PROBE_TOKENS, _PROBE_BLOCK_TOKENS)[-1]


def _packed(block: Sequence[int]) -> bytes:
    """Return token ids as little-endian 32-bit words, whatever the machine."""
    for token in block:
        if not 0 <= token <= _MAX_TOKEN:
            raise ValueError(f"token is {token}; give 0 to {_MAX_TOKEN}")
    return struct.pack(f"<{len(block)}I", *block)
