"""Tiny models with seeded weights, for a real vLLM: `python -m tests.vllm.models NAME DIRECTORY`.

Each has six layers and 1 to 10 million parameters, is made in a fraction of a second, and is the
same on every machine. The head sizes are those that vLLM's CPU kernels take; the spread of the
weights is such that greedy decoding gives varied tokens. The tokenizer is one token per byte.

A made model is kept below `$XDG_CACHE_HOME/kvd-env/models` (default `~/.cache`), named by a digest
of this file, of the demo's model and of the libraries that write it: no edit meets an old model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from engine_shim.vllm.demo import model as of_demo

VOCABULARY: Final = of_demo.VOCABULARY
BYTES: Final = of_demo.BYTES
NUM_LAYERS: Final = 6
SEED: Final = 20260101
CHAT_TEMPLATE: Final = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_COMMON: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "bos_token_id": BYTES + 1,
        "eos_token_id": BYTES + 2,
    }
)
_DENSE: Final[Mapping[str, Any]] = MappingProxyType(
    {**_COMMON, "num_key_value_heads": 2, "head_dim": 32}
)
_LATENT: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **_COMMON,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,  # with the rotary part 576 per row, the one size of the CPU kernels
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
)
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
_SIGMOID: Final[Mapping[str, Any]] = MappingProxyType(
    {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
)
_SPARSE: Final[Mapping[str, Any]] = MappingProxyType(
    {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 64}
)
_DRAFT: Final[Mapping[str, Any]] = MappingProxyType({"num_nextn_predict_layers": 1})


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a model is made of.

    `family` begins the names of its classes in transformers; `config` are the arguments of its
    configuration, `added` what is put into config.json beside those, for vLLM; `spread` is the
    standard deviation of every weight that is neither a norm nor a bias. With `has_draft` a layer
    behind the last guesses tokens (MTP): transformers does not know it, vLLM loads it when asked.
    """

    family: str
    config: Mapping[str, Any]
    spread: float
    added: Mapping[str, Any]
    has_draft: bool = False


RECIPES: Final[Mapping[str, Recipe]] = MappingProxyType(
    {
        "llama": Recipe("Llama", _DENSE, 0.12, _NOTHING),
        "qwen3": Recipe("Qwen3", _DENSE, 0.12, _NOTHING),
        "deepseek_v2": Recipe("DeepseekV2", _LATENT, 0.14, _NOTHING),
        "deepseek_v3": Recipe("DeepseekV3", _LATENT, 0.12, _SIGMOID),
        "deepseek_v32": Recipe("DeepseekV32", {**_LATENT, **_SPARSE}, 0.12, _SIGMOID),
        "glm_moe_dsa": Recipe("GlmMoeDsa", {**_LATENT, **_SPARSE}, 0.12, _SIGMOID),
        "deepseek_v3_mtp": Recipe("DeepseekV3", _LATENT, 0.12, {**_SIGMOID, **_DRAFT}, True),
        "deepseek_v32_mtp": Recipe(
            "DeepseekV32", {**_LATENT, **_SPARSE}, 0.12, {**_SIGMOID, **_DRAFT}, True
        ),
    }
)
"""The models by name: two with dense attention, two with MLA, two with sparse attention (DSA).

Those with a draft layer have the weights of their namesakes besides.
"""


def model(name: str, **changes: Any) -> Path:
    """Return the directory of a model, made unless it is there.

    Args:    name: of `RECIPES`.
             changes: arguments of the configuration that differ, `index_topk=4096` for example.
    Raises:  KeyError for a name that there is no recipe for.
    """
    recipe = RECIPES[name]
    kept = _models() / f"{name}-{_digest(recipe, changes)}"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=kept.parent))
        try:
            write(name, new, **changes)
            _move(new, kept)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return kept


def write(name: str, into: Path, **changes: Any) -> None:
    """Write a model's weights, configuration and tokenizer into a directory."""
    # Imported here: who lists the names or finds a made model needs none of it.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    recipe = RECIPES[name]
    made = _weights(recipe, {**recipe.config, **changes})
    if recipe.has_draft:
        longer = {**recipe.config, **changes, "num_hidden_layers": NUM_LAYERS + 1}
        state = {**made.state_dict(), **_draft_layer(_weights(recipe, longer).state_dict())}
        made.save_pretrained(into, state_dict=state)
    else:
        made.save_pretrained(into)
    of_demo.byte_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(into)
    path = into / "config.json"
    told = json.loads(path.read_text(encoding="utf-8"))
    told.update(recipe.added)
    path.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _weights(recipe: Recipe, arguments: Mapping[str, Any]) -> Any:
    """Return a model of transformers with the weights of a recipe."""
    import torch
    import transformers

    config = getattr(transformers, f"{recipe.family}Config")(**arguments)
    with torch.no_grad():
        made = getattr(transformers, f"{recipe.family}ForCausalLM")(config).to(torch.float32)
        for key, weight in made.named_parameters():
            if "norm" not in key and "bias" not in key:
                generator = torch.Generator().manual_seed(_seed(key))
                weight.normal_(0.0, recipe.spread, generator=generator)
    return made


def _draft_layer(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of the draft layer of a model whose last layer is to be it.

    It takes the main model's hidden state nearly as it is, and so guesses that the last token comes
    again: now and then that is right.
    """
    import torch

    prefix = f"model.layers.{NUM_LAYERS}."
    head, table = state["lm_head.weight"], state["model.embed_tokens.weight"]
    width = head.shape[1]
    made = {key: 0.2 * it for key, it in state.items() if key.startswith(prefix)}
    norms = {key: torch.ones_like(it) for key, it in made.items() if "norm" in key}
    ones = {f"{prefix}{name}.weight": torch.ones(width) for name in ("enorm", "hnorm")}
    return {
        **made,
        **norms,
        **ones,
        f"{prefix}shared_head.norm.weight": torch.ones(width),
        f"{prefix}eh_proj.weight": torch.cat((torch.zeros(width, width), torch.eye(width)), 1),
        f"{prefix}shared_head.head.weight": head.clone(),
        f"{prefix}embed_tokens.weight": table.clone(),
    }


def _seed(key: str) -> int:
    """Return the seed of a weight: by its name, so that models which share it share its values."""
    return int.from_bytes(hashlib.sha256(f"{SEED} {key}".encode()).digest()[:6], "little")


def _models() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).absolute() / "kvd-env" / "models"


def _digest(recipe: Recipe, changes: Mapping[str, Any]) -> str:
    from importlib.metadata import version

    whole = hashlib.sha256(Path(__file__).read_bytes() + Path(of_demo.__file__).read_bytes())
    whole.update(json.dumps([recipe.family, sorted(changes.items())]).encode())
    whole.update(f"{version('torch')} {version('transformers')}".encode())
    return whole.hexdigest()[:12]


def _move(new: Path, kept: Path) -> None:
    """Give a made model its name; another maker of the same model may have been first."""
    try:
        new.rename(kept)
    except OSError:
        if not kept.exists():
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Write one model into a directory that is made for it."""
    parser = argparse.ArgumentParser(prog="models", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=tuple(RECIPES))
    parser.add_argument("directory", type=Path)
    chosen = parser.parse_args(arguments)
    chosen.directory.mkdir(parents=True, exist_ok=True)
    write(chosen.name, chosen.directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
