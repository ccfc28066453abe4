"""A sparse model with a draft layer (MTP): the last layer's weights again, and what joins it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

from tests.vllm import models

DRAFT: Final = models.NUM_LAYERS
"""Number of the draft layer, behind the others."""

_SPREAD: Final = 0.12


def model_with_draft_layer(into: Path) -> Path:
    """Write the model below a directory, and return its own."""
    import torch
    from safetensors.torch import load_file, save_file

    made = into / "with-draft-layer"
    shutil.copytree(models.model("deepseek_v32"), made)
    (path,) = made.glob("*.safetensors")
    weights = load_file(path)
    last, new = f"model.layers.{DRAFT - 1}.", f"model.layers.{DRAFT}."
    for name in [name for name in weights if name.startswith(last)]:
        weights[new + name.removeprefix(last)] = weights[name].clone()
    embedding = weights["model.embed_tokens.weight"]
    hidden = embedding.shape[1]
    chance = torch.Generator().manual_seed(models.SEED)
    weights[f"{new}embed_tokens.weight"] = embedding.clone()
    weights[f"{new}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    weights[f"{new}eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=chance) * _SPREAD
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{new}{norm}.weight"] = torch.ones(hidden)
    save_file(weights, path, metadata={"format": "pt"})
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    config["num_nextn_predict_layers"] = 1
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made
