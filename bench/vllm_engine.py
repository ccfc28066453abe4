"""One engine of `bench.vllm_decode`, in an environment with vLLM; it is run by that bench.

`python -m bench.vllm_engine model DIRECTORY` writes the model: four layers with sparse attention
(DSA, of the shape of GLM-5), two of them with an indexer, and weights by chance from a fixed seed.
`python -m bench.vllm_engine decode` reads an order from its input and answers with one JSON line.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

MARK: Final = "bench: "
"""Begins the line that is the answer; vLLM writes lines of its own."""

SEED: Final = 20260101
SPREAD: Final = 0.12
BYTES: Final = 256
CONFIG: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "bos_token_id": BYTES + 1,
        "eos_token_id": BYTES + 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_topk": 256,
        "index_topk_freq": 2,
    }
)


def write_model(into: Path) -> None:
    """Write weights and configuration into a directory; prompts are tokens, it has no tokenizer."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.GlmMoeDsaConfig(**CONFIG)
    torch.manual_seed(SEED)
    with torch.no_grad():
        made = transformers.GlmMoeDsaForCausalLM(config).to(torch.float32)
        for key, weight in made.named_parameters():
            if "norm" not in key and "bias" not in key:
                weight.normal_(0.0, SPREAD)
    made.save_pretrained(into)
    path = into / "config.json"
    told = json.loads(path.read_text(encoding="utf-8"))
    told |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    path.write_text(json.dumps(told), encoding="utf-8")


def decode(order: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Generate with an engine of this process, round by round.

    Args:    order: model, arguments of vLLM's `LLM`, rounds (lengths of the prompts that are asked
                    at once), new (tokens for each).
    Returns: by round: tokens by request, seconds of each step in which all decode, and figures of
             the hot buffers.
    """
    from vllm import LLM
    from vllm.config import KVTransferConfig

    given = dict(order["arguments"])
    has_buffers = "kv_transfer_config" in given
    if has_buffers:
        given["kv_transfer_config"] = KVTransferConfig(**given["kv_transfer_config"])
    core = LLM(model=order["model"], **given).llm_engine
    rounds = []
    before = dict[str, float]()
    for number, lengths in enumerate(order["rounds"]):
        tokens, steps = _round(core, number, lengths, order["new"])
        counted = _counted() if has_buffers else {}
        figures = {name: count - before.get(name, 0) for name, count in counted.items()}
        before = counted
        rounds.append({"tokens": tokens, "steps": steps, "figures": figures})
    core.engine_core.shutdown()
    return rounds


def _round(
    core: Any, number: int, lengths: Sequence[int], num_new: int
) -> tuple[list[list[int]], list[float]]:
    """Tokens of the requests, and seconds of each step in which all decode."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False
    )
    chance = random.Random(SEED + number)
    for at, length in enumerate(lengths):
        prompt = [chance.randrange(BYTES) for _ in range(length)]
        core.add_request(f"{number}-{at}", {"prompt_token_ids": prompt}, sampling)
    tokens: dict[str, list[int]] = {}
    steps: list[float] = []
    while core.has_unfinished_requests():
        decodes = len(tokens) == len(lengths)
        began = time.perf_counter()
        outputs = core.step()
        if decodes and len(outputs) == len(lengths):
            steps.append(time.perf_counter() - began)
        for output in outputs:
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    return [tokens[name] for name in sorted(tokens)], steps


def _counted() -> dict[str, float]:
    """Counts of all hot buffers together so far; a step of a request is timed in each group."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from engine_shim.hot_meter import GroupFigures, together

    groups = get_kv_transfer_group()._sparse.store.hot.statistics().groups
    whole = reduce(together, groups, GroupFigures())
    return asdict(whole.rows) | {
        "timed": whole.sampled / len(groups),
        "managed_us": whole.managed_ns / 1000,
        "waited_us": whole.waited_ns / 1000,
        "copied_us": whole.copied_ns / 1000,
    }


def main(arguments: list[str]) -> int:
    """Do as told."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if arguments[0] == "model":
        write_model(Path(arguments[1]))
        return 0
    answer = decode(json.loads(sys.stdin.read()))
    print(f"{MARK}{json.dumps(answer)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
