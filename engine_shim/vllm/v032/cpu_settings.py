"""What vLLM's CPU platform decides of MLA models, put right for kvd's sparse attention.

On processors without AMX its own MLA kernel takes blocks of 16 tokens, no chunks of prompts, and no
prefixes that are found again; so it sets every MLA model. `cpu_sparse` attends without that kernel,
and takes all of it on every processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

BLOCK_TOKENS: Final = 128
"""vLLM's own choice for the CPU, where nobody asks for another."""


def with_own_settings(original: Callable[[Any], None]) -> Callable[[type, Any], None]:
    """Make `CpuPlatform.check_and_update_config` leave sparse models as they were asked for.

    Args: original: the bound method.
    """

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        model = vllm_config.model_config
        if model is None or not _is_ours(model):
            original(vllm_config)
            return
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        block = cache.block_size if cache.user_specified_block_size else BLOCK_TOKENS
        asked = (scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens)
        prefixes = cache.enable_prefix_caching
        original(vllm_config)
        cache.block_size, cache.enable_prefix_caching = block, prefixes
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = asked

    return check_and_update_config


def _is_ours(model: Any) -> bool:
    """Whether `cpu_sparse` attends; models that also compress their KV have attention of vLLM's."""
    config = model.hf_text_config
    return hasattr(config, "index_topk") and not hasattr(config, "compress_ratios")
