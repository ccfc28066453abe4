"""Ways to run vLLM that no mode supports: each is refused by its name, with what to change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_shim.vllm.errors import UnsupportedEngine
from engine_shim.vllm.v032.config import check_engine


def config() -> Any:
    """What the check reads of a `VllmConfig`."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        speculative_config=None,
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
    )


def test_plain_engine_is_taken() -> None:
    check_engine(config())


@pytest.mark.parametrize(
    "name",
    ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"],
)
def test_parallelism_that_is_not_supported_is_refused(name: str) -> None:
    engine = config()
    setattr(engine.parallel_config, name, 2)
    with pytest.raises(UnsupportedEngine, match=f"{name} is 2; .* set it to 1"):
        check_engine(engine)


def test_drafts_with_asynchronous_scheduling_are_refused() -> None:
    engine = config()
    engine.scheduler_config.async_scheduling = True
    engine.speculative_config = SimpleNamespace()
    with pytest.raises(UnsupportedEngine, match="give --no-async-scheduling"):
        check_engine(engine)


def test_hashes_that_no_other_process_has_are_refused() -> None:
    engine = config()
    engine.cache_config.prefix_caching_hash_algo = "xxhash_cbor"
    with pytest.raises(UnsupportedEngine, match=r"xxhash_cbor, .* give sha256"):
        check_engine(engine)
