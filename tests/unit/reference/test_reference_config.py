"""Model sizes: what is refused, and what a row costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_shim.reference.config import ModelConfig, demo, tiny

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("hidden", 0),
        ("hidden", 100),
        ("num_heads", 3),
        ("index_layers", ()),
        ("index_layers", (1, 3)),
        ("index_layers", (0, 3, 3)),
        ("index_layers", (0, 3, 2)),
        ("index_layers", (0, 7)),
        ("index_topk", 0),
        ("index_heads", -1),
        ("index_dim", 40),
        ("kv_lora_rank", 8),
        ("rope_dim", 24),
        ("dtype", torch.float16),
        ("vocab", 258),
        ("seed", -1),
        ("max_positions", 0),
        ("query_tile", 0),
        ("query_group", 0),
        ("key_tile", 0),
    ],
)
def test_wrong_field_is_named(field: str, value: object) -> None:
    fields: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=rf"^{field} is .*; (give|start) "):
        ModelConfig(**fields)


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_row_bytes(dtype: torch.dtype, size: int) -> None:
    config = ModelConfig(num_layers=5, index_layers=(0, 2), index_dim=32, dtype=dtype)
    assert config.main_row_bytes == 576 * size
    assert config.index_row_bytes == 32 * size
    assert config.token_bytes == (5 * 576 + 2 * 32) * size


def test_a_float8_index_key_has_a_scale_behind_it() -> None:
    config = ModelConfig(index_dim=128, index_fp8=True)
    assert (config.index_row_bytes, config.index_elements) == (132, 132)
    assert config.index_storage == torch.uint8


def test_layers_follow_the_indexer_before_them() -> None:
    config = ModelConfig(num_layers=5, index_layers=(0, 3))
    assert [config.index_layer_of(layer) for layer in range(5)] == [0, 0, 0, 3, 3]


@pytest.mark.parametrize("layer", [-1, 5])
def test_unknown_layer_is_refused(layer: int) -> None:
    with pytest.raises(ValueError, match=f"layer is {layer}; give 0 to 4"):
        ModelConfig(num_layers=5, index_layers=(0, 3)).index_layer_of(layer)


def test_presets_keep_the_real_row() -> None:
    assert tiny().row_dim == demo().row_dim == 576
    assert demo().num_layers >= 6
