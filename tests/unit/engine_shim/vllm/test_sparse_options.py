"""`sparse_kv_offload_config`: the guide's keys are read, what cannot be meant is refused."""

from __future__ import annotations

import pytest

from engine_shim.vllm.errors import OptionError
from engine_shim.vllm.options import parse_options
from engine_shim.vllm.sparse_options import DRAM_GIB_MAX, GIB, KEY, SLOTS_MAX, SparseOptions

ON = {"enabled": True}


def parse(given: object) -> SparseOptions | None:
    """Read the options where they stand."""
    return parse_options({KEY: given}).sparse


def test_the_guides_json_is_taken() -> None:
    given = {**ON, "topk_buffer_size": 4096, "dram_size_per_dp_GB": 128}
    assert parse(given) == parse(ON) == SparseOptions(4096, 128, keep_device=False)
    assert SparseOptions(dram_gib=1.5).dram_bytes == GIB * 3 // 2


@pytest.mark.parametrize("given", [{}, {"enabled": False}, {"enabled": False, "nonsense": 1}])
def test_what_is_not_enabled_is_not_looked_at(given: dict[str, object]) -> None:
    assert parse(given) is None
    assert parse_options({}).sparse is None


@pytest.mark.parametrize("slots", [1, SLOTS_MAX])
@pytest.mark.parametrize("dram", [0.001, DRAM_GIB_MAX])
def test_limits_are_taken(slots: int, dram: float) -> None:
    given = {**ON, "topk_buffer_size": slots, "dram_size_per_dp_GB": dram}
    assert parse(given | {"keep_device_kv_cache": True}) == SparseOptions(
        slots, dram, keep_device=True
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([], rf"{KEY} is \[\]; give an object with enabled, "),
        ({"enabled": 1}, "enabled is 1; give true or false"),
        ({**ON, "keep_device_kv_cache": "no"}, "keep_device_kv_cache is 'no'; give true or false"),
        ({**ON, "topk_buffer_size": 0}, "topk_buffer_size is 0; give a whole number from 1 to"),
        ({**ON, "topk_buffer_size": SLOTS_MAX + 1}, f"topk_buffer_size is {SLOTS_MAX + 1}; give"),
        ({**ON, "topk_buffer_size": True}, "topk_buffer_size is True; give"),
        ({**ON, "topk_buffer_size": 4096.0}, "topk_buffer_size is 4096.0; give"),
        ({**ON, "dram_size_per_dp_GB": 0}, "dram_size_per_dp_GB is 0; give GiB, more than 0"),
        ({**ON, "dram_size_per_dp_GB": "128"}, "dram_size_per_dp_GB is '128'; give GiB"),
        ({**ON, "dram_size_per_dp_GB": DRAM_GIB_MAX + 1}, f"at most {DRAM_GIB_MAX}"),
        ({**ON, "dram_size_per_dp_gb": 1}, "did you mean dram_size_per_dp_GB?"),
        ({**ON, "zzz": 1}, "zzz is not known; known keys: enabled, topk_buffer_size"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: object, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        parse(given)
