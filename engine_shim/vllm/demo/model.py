"""A small Llama with seeded weights: `python -m engine_shim.vllm.demo.model DIRECTORY`.

It is made where vLLM is installed, since that has transformers. Twelve layers, so that sharing
buffers shows; the spread of the weights is such that greedy decoding gives varied tokens. The
tokenizer has one token per byte.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

BYTES: Final = 256
VOCABULARY: Final = 512
UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
LENGTH_MAX: Final = 32768
NUM_LAYERS: Final = 12
TOKEN_BYTES: Final = NUM_LAYERS * 2 * 4 * 32 * 4
"""KV of a token: keys and values of 4 heads of 32 in float32, in every layer."""

CONFIG: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": LENGTH_MAX,
        "tie_word_embeddings": False,
        "bos_token_id": BYTES + 1,
        "eos_token_id": BYTES + 2,
    }
)
SPREAD: Final = 0.1


def write_model(into: Path, seed: int) -> None:
    """Write weights, configuration and tokenizer into a directory."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with torch.no_grad():
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).to(torch.float32)
        for key, weight in made.named_parameters():
            if "norm" not in key:
                generator = torch.Generator().manual_seed(_seed(seed, key))
                weight.normal_(0.0, SPREAD, generator=generator)
    made.save_pretrained(into)
    byte_tokenizer().save_pretrained(into)


def _seed(seed: int, key: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {key}".encode()).digest()[:6], "little")


def byte_tokenizer(**more: Any) -> Any:
    """Return a tokenizer with a token for each byte, three special ones, and fillers.

    Args: more: what `PreTrainedTokenizerFast` is to have beside, a chat template for example.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), UNKNOWN, BEGIN, END]
    symbols += [f"<f{number}>" for number in range(len(symbols), VOCABULARY)]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token=UNKNOWN, bos_token=BEGIN, eos_token=END, **more
    )


def main(arguments: Sequence[str]) -> int:
    """Write the model into a directory that is there."""
    directory, seed = arguments
    write_model(Path(directory), int(seed))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
