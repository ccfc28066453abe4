"""The options of sparse decode offload: `sparse_kv_offload_config`, with the keys of the guide.

The key may stand in `kv_connector_extra_config`, or in vLLM's `--additional-config`, as the guide
has it. With `enabled` false nothing else of it is looked at.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from engine_shim.vllm.errors import OptionError

KEY: Final = "sparse_kv_offload_config"
KEYS: Final = (
    "enabled",
    "topk_buffer_size",
    "dram_size_per_dp_GB",
    "keep_device_kv_cache",
    "overlap_attention",
)
GIB: Final = 1 << 30
DRAM_GIB_MAX: Final = 65536
SLOTS_MAX: Final = 262_144
"""Rows that the books of a hot buffer can number beside a position, in 32 bits."""


@dataclass(frozen=True, slots=True)
class SparseOptions:
    """What a user can choose; the defaults are those of the guide.

    slots:       rows of a hot buffer in each layer (`topk_buffer_size`).
    dram_gib:    host memory of the decode region, of all ranks together (`dram_size_per_dp_GB`).
    keep_device: for debugging: the device keeps all KV as well, and each row is compared with it.
    overlap:     whether attention begins while rows are loaded; kvd's own, the guide has it not.
    """

    slots: int = 4096
    dram_gib: float = 128
    keep_device: bool = False
    overlap: bool = False

    @property
    def dram_bytes(self) -> int:
        """The host memory in bytes."""
        return int(self.dram_gib * GIB)


_DEFAULT: Final = SparseOptions()


def parse_sparse(given: object, where: str) -> SparseOptions | None:
    """Read the options; None where they are not there or not enabled.

    Args:   where: the key that they are the value of, for errors.
    Raises: OptionError for the first one that cannot be used.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise OptionError(f"{where} is {given!r}; give an object with {', '.join(KEYS)}")
    if not _switch(given, where, "enabled"):
        return None
    for key in given:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(KEYS)}"
            raise OptionError(f"{where}.{key} is not known; {hint}")
    slots = given.get("topk_buffer_size", _DEFAULT.slots)
    if type(slots) is not int or not 1 <= slots <= SLOTS_MAX:
        raise OptionError(
            f"{where}.topk_buffer_size is {slots!r}; give a whole number from 1 to {SLOTS_MAX}, "
            "twice the index_topk of the model to start with"
        )
    dram = given.get("dram_size_per_dp_GB", _DEFAULT.dram_gib)
    if type(dram) not in (int, float) or not 0 < dram <= DRAM_GIB_MAX:
        raise OptionError(
            f"{where}.dram_size_per_dp_GB is {dram!r}; give GiB, more than 0 and at most "
            f"{DRAM_GIB_MAX}"
        )
    keep_device = _switch(given, where, "keep_device_kv_cache")
    return SparseOptions(slots, dram, keep_device, _switch(given, where, "overlap_attention"))


def _switch(given: Mapping[str, object], where: str, key: str) -> bool:
    value = given.get(key, False)
    if type(value) is not bool:
        raise OptionError(f"{where}.{key} is {value!r}; give true or false")
    return value
