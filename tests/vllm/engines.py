"""Engines of a real vLLM in the process of the test, and answers that can be compared.

Several engines may be made one after another in a process; two at once would share vLLM's groups::

    with Engine("llama", max_num_batched_tokens=256) as engine:
        answers = engine.generate([prompt(1, 700)], 12)
    assert_same(answers, reference, digits=5)
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self

from tests.vllm import models

NUM_TOP: Final = 5
SHOWN_MAX: Final = 12

ARGUMENTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 64 << 20,  # the default is a share of the machine's memory
        "seed": 0,
    }
)
"""What engines are made with unless a test says otherwise."""

BACKENDS: Final[Mapping[str, str]] = MappingProxyType(
    {"deepseek_v2": "CPU_MLA", "deepseek_v3": "CPU_MLA"}
)
"""Attention of models for which vLLM would choose by the processor: AMX_MLA where that has AMX.

CPU_MLA has blocks of 16 tokens, and neither chunks nor hits of earlier prompts; AMX_MLA has both,
and no float32. The sparse models have blocks of 128, chunks and hits, on every processor.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine said to one prompt.

    Per generated token: its id, its log probability, and those of the `NUM_TOP` likeliest tokens
    by id. `num_cached` counts the tokens of the prompt that were not computed.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[Mapping[int, float], ...]
    finish: str | None
    num_cached: int
    transfer: Mapping[str, Any] | None


class Engine:
    """One engine; leave its context to end it, so that the next one finds the process clean.

    Attributes: llm: vLLM's own object.
                config: its `VllmConfig`.
    """

    def __init__(self, model: str | Path, **arguments: Any) -> None:
        """Make an engine.

        Args: model: a name of `models.RECIPES`, or the directory of a model.
              arguments: of vLLM's `LLM`, over `ARGUMENTS`; `kv_transfer_config` may be a dict.
        """
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        chosen = {**ARGUMENTS, **arguments}
        if model in BACKENDS:
            chosen.setdefault("attention_config", {"backend": BACKENDS[str(model)]})
        transfer = chosen.get("kv_transfer_config")
        if isinstance(transfer, dict):
            chosen["kv_transfer_config"] = KVTransferConfig(**transfer)
        path = model if isinstance(model, Path) else models.model(model)
        _look_here(path)
        with contextlib.ExitStack() as stack:  # one that is refused must not be in the next's way
            stack.callback(cleanup_dist_env_and_memory)
            stack.callback(ensure_kv_transfer_shutdown)
            self.llm: Any = LLM(model=str(path), **chosen)
            stack.pop_all()
        self.config: Any = self.llm.llm_engine.vllm_config

    @property
    def block_tokens(self) -> int:
        """Tokens per block: what the attention's kernels asked for, not what a test assumes."""
        return int(self.config.cache_config.block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks of the device's KV cache, the null block included."""
        return int(self.config.cache_config.num_gpu_blocks)

    @property
    def layers(self) -> Mapping[str, Any]:
        """The attention layers (and DSA's key caches) by name, in their order."""
        return dict(self.config.compilation_config.static_forward_context)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        transfer: Mapping[str, Any] | None = None,
    ) -> list[Answer]:
        """Generate greedily, all prompts at once, each to the full number of tokens.

        Args: prompts: token ids.
              transfer: `kv_transfer_params` of every request.
        """
        from vllm import SamplingParams

        extra = {"kv_transfer_params": dict(transfer)} if transfer is not None else None
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            logprobs=NUM_TOP,
            detokenize=False,
            extra_args=extra,
        )
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(asked, sampling, use_tqdm=False)
        return [_answer(output) for output in outputs]

    def close(self) -> None:
        """End the engine and let go of its memory; a second call does nothing."""
        from vllm.distributed import cleanup_dist_env_and_memory

        if self.llm is None:
            return
        self.llm.llm_engine.engine_core.shutdown()
        self.config.compilation_config.static_forward_context.clear()
        self.llm = None
        cleanup_dist_env_and_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def prompt(seed: int, length: int) -> list[int]:
    """Return the token ids of a prompt that no other seed begins in the same way."""
    chance = random.Random(seed)
    return [chance.randrange(models.BYTES) for _ in range(length)]


def abort_at_each_step(engine: Engine, length: int, num_tokens: int) -> None:
    """Run three requests at a time, and abort two of them after one step, after two, up to six.

    Args: length: tokens of a prompt; num_tokens: that would be generated.
    """
    from vllm import SamplingParams

    core = engine.llm.llm_engine
    for steps in range(1, 7):
        names = [f"abort-{steps}-{at}" for at in range(3)]
        for at, name in enumerate(names):
            sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            tokens = prompt(100 * steps + at, length)
            core.add_request(name, {"prompt_token_ids": tokens}, sampling)
        for _ in range(steps):
            core.step()
        core.abort_request(names[:2])
        while core.has_unfinished_requests():
            core.step()


def assert_same(got: Iterable[Answer], wanted: Iterable[Answer], digits: int = 0) -> None:
    """Assert that answers have the same tokens, and log probabilities that agree to some digits.

    Args: digits: after the point, 0 for 5; or for 4 where another number of tokens was found: then
        prompts were computed in other pieces, matrices have other shapes, and kernels of some
        processors add in another order (5.7e-6 were seen on Zen 4, with logits of about 4).

    Raises: AssertionError naming the first token that differs, and by how much, per answer.
    """
    told = [
        f"answer {number}: {text}"
        for number, (one, other) in enumerate(zip(got, wanted, strict=True))
        if (text := difference(one, other, digits or _digits(one, other))) is not None
    ]
    assert not told, "\n".join(("answers differ", *told[:SHOWN_MAX]))


def _digits(got: Answer, wanted: Answer) -> int:
    """Digits in which two answers to one prompt agree, unless a test knows better."""
    return 5 if got.num_cached == wanted.num_cached else 4


def difference(got: Answer, wanted: Answer, digits: int) -> str | None:
    """Return what differs first between two answers, or None where nothing does."""
    if len(got.tokens) != len(wanted.tokens):
        return f"{len(got.tokens)} tokens, wanted {len(wanted.tokens)} ({got.finish})"
    for at, (token, other) in enumerate(zip(got.tokens, wanted.tokens, strict=True)):
        if token != other:
            ahead = sum(a == b for a, b in zip(got.tokens, wanted.tokens, strict=True))
            return f"token {at} is {token}, wanted {other}; {ahead} of {len(got.tokens)} agree"
        if (gap := _gap(got, wanted, at)) >= 0.5 * 10**-digits:
            return f"log probabilities of token {at} ({token}) differ by {gap:.2e}"
    return None


def _gap(got: Answer, wanted: Answer, at: int) -> float:
    """Return the largest difference of log probabilities at a token.

    Of the likeliest tokens those count that both name: the last of them may change places.
    """
    both = got.top[at].keys() & wanted.top[at].keys()
    gaps = [abs(got.top[at][token] - wanted.top[at][token]) for token in both]
    return max([abs(got.logprobs[at] - wanted.logprobs[at]), *gaps])


def _look_here(path: Path) -> None:
    """Have vLLM look at the model's class in this process, which imports it anyway.

    Left alone it does so in a process of its own, which takes as long as importing vLLM does.
    """
    from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel

    for name in json.loads((path / "config.json").read_text(encoding="utf-8"))["architectures"]:
        known = ModelRegistry.models[name]
        if isinstance(known, _LazyRegisteredModel):
            ModelRegistry.register_model(name, known.load_model_cls())


def _answer(output: Any) -> Answer:
    said = output.outputs[0]
    tokens = tuple(said.token_ids)
    return Answer(
        tokens=tokens,
        logprobs=tuple(
            float(some[token].logprob) for token, some in zip(tokens, said.logprobs, strict=True)
        ),
        top=tuple(
            MappingProxyType({token: float(value.logprob) for token, value in some.items()})
            for some in said.logprobs
        ),
        finish=said.finish_reason,
        num_cached=output.num_cached_tokens or 0,
        transfer=output.kv_transfer_params,
    )
