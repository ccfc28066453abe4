"""Sparse attention (DSA) on vLLM's CPU platform, for DeepSeek-V3.2 and GLM-MoE-DSA.

vLLM has DSA for accelerators only. `install` gives its CPU platform a backend for the sparse MLA
layers and one for the index cache, and gives the indexer a forward pass in torch. It is meant for
tests and demonstrations on machines without an accelerator: correct and deterministic, not fast.

In each layer the order is: the indexer writes the keys of the step's tokens, then selects, then
vLLM writes the KV rows of these tokens, then `SparseImpl` attends. The selection of a layer is
known before its KV is written, so rows that are elsewhere can be fetched in between. All tokens,
those of a prefill too, go through `forward_mqa`: the metadata calls every token a decode.

vLLM's rotary kernel for the CPU takes [T, heads * size]. MLA layers pass [T, heads, size], of which
it rotates the wrong elements without a word: tokens then depend on their place in the step. So
`install` sends such tensors to vLLM's own torch version, for every MLA model.

On processors without AMX vLLM would serve MLA models, these too, without chunks and prefix hits;
see `v032.cpu_settings`.

`SparseImpl.rows` is the one way to KV rows: what keeps them elsewhere replaces `PagedRows`, as
`sparse_rows.LayerRows` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models import deepseek_v2
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MLAAttentionImpl,
    MultipleOf,
)

from engine_shim.vllm import sparse_math
from engine_shim.vllm.v032.cpu_settings import with_own_settings
from engine_shim.vllm.versions import need_known_vllm

ROW_SIZE: Final = 576
"""Elements of a KV row: 512 latent, 64 rotary; the one size of every DSA model there is."""

INDEX_ROW_BYTES: Final = 128 + sparse_math.SCALE_BYTES
BLOCK_STEP: Final = 16
QUERIES_AT_ONCE: Final = 32
"""Bounds the copies of selected rows: 32 queries * 2048 rows * 576 floats are 151 MB."""

_MARK: Final = "installed_by_kvd"


@dataclass
class SparseMetadata(AttentionMetadata):
    """What a step is made of, for the attention and for the indexer.

    `starts` has one more element than there are requests: request r has the step's tokens from
    `starts[r]` to `starts[r + 1]`, and `seq_lens[r]` tokens in all, those included. `block_table`
    is [requests, blocks]. The last three fields are read by vLLM.
    """

    num_reqs: int
    num_actual_tokens: int
    starts: list[int]
    seq_lens: list[int]
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    block_size: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0


class SparseMetadataBuilder(AttentionMetadataBuilder):
    """Makes the metadata of a step; vLLM keeps one per group of layers."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._block_size = int(kv_cache_spec.block_size)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> SparseMetadata:
        """Return the metadata of a step."""
        common = common_attn_metadata
        return SparseMetadata(
            num_reqs=common.num_reqs,
            num_actual_tokens=common.num_actual_tokens,
            starts=common.query_start_loc_cpu.tolist(),
            seq_lens=common.seq_lens.tolist(),
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
            block_size=self._block_size,
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
        )


class SparseBackend(AttentionBackend):
    """How vLLM asks about sparse MLA layers."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        """Return the name for vLLM's log."""
        return "KVD_CPU_MLA_SPARSE"

    @staticmethod
    def get_builder_cls() -> type[SparseMetadataBuilder]:
        """Return what makes the metadata."""
        return SparseMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[SparseImpl]:
        """Return what attends."""
        return SparseImpl

    @classmethod
    def is_mla(cls) -> bool:
        """Return that a token has one row for all heads."""
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        """Return that a query sees selected tokens."""
        return True

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the sizes of a KV row."""
        return [ROW_SIZE]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return that any block of whole steps will do."""
        return [MultipleOf(BLOCK_STEP)]


class IndexBackend(SparseBackend):
    """How vLLM asks about the index cache, which has no attention of its own."""

    @staticmethod
    def get_name() -> str:
        """Return the name for vLLM's log."""
        return "KVD_CPU_INDEX"

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the size of an index row in bytes."""
        return [INDEX_ROW_BYTES]


class RowStore(Protocol):
    """Where a layer's KV rows are."""

    def write(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Put rows [T, R] at slots [T]; a negative slot is skipped."""

    def read(
        self, cache: torch.Tensor, step: SparseMetadata, request: int, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return rows of a request of the step, [..., R], by their positions.

        Args: request: its number in the step.
              tokens: of any shape; -1 for none, where some row may stand.
        """

    def parts(
        self, cache: torch.Tensor, step: SparseMetadata, request: int, tokens: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]] | None:
        """Return the rows in the order in which they come; None when `read` is as good.

        Args:    tokens: [T, K]; others as `read`.
        Returns: rows [T, some, R] and which of them are a query's [T, some]; all together are the
                 rows of `tokens`.
        """


class PagedRows:
    """Rows in vLLM's own paged cache [blocks, block tokens, R], addressed by slot."""

    def write(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Put rows [T, R] at slots [T]; a negative slot is skipped."""
        wanted = slots >= 0
        cache.view(-1, cache.shape[-1])[slots[wanted].long()] = rows[wanted].to(cache.dtype)

    def read(
        self, cache: torch.Tensor, step: SparseMetadata, request: int, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return rows of a request of the step, by their positions."""
        table, size = step.block_table[request], step.block_size
        slots = sparse_math.slots_of(table, tokens.clamp(min=0), size)
        return cache.view(-1, cache.shape[-1])[slots]

    def parts(
        self, cache: torch.Tensor, step: SparseMetadata, request: int, tokens: torch.Tensor
    ) -> None:
        """All rows are there."""


class SparseImpl(MLAAttentionImpl, SharedTopkIndicesBuffer):
    """Attention of one sparse MLA layer over the tokens that its indexer selected."""

    is_sparse = True
    supports_dense_mha_prefill = False
    can_return_lse_for_decode = False
    supports_quant_query_input = False
    q_pad_num_heads = None
    dcp_world_size = 1

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        *unused: Any,
        kv_lora_rank: int,
        indexer: Any = None,
        topk_indices_buffer: torch.Tensor | None = None,
        **unused_by_name: Any,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank = kv_lora_rank
        self.rows: RowStore = PagedRows()
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)

    def record_logical_topk_ready(self) -> None:
        """Do nothing: on the CPU the selection is there when the indexer returns."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write the step's KV rows; the negative slots of `slot_mapping` are skipped.

        Args: kv_c_normed: [T, L]; k_pe: [T, 1, rotary]; kv_cache: [blocks, block tokens, R].
              slot_mapping: int64, may be shorter than T where the step was padded.
        """
        if kv_cache.numel() == 0:  # not allocated yet
            return
        slots = slot_mapping.flatten()
        rows = torch.cat((kv_c_normed, k_pe.squeeze(1)), dim=-1)
        self.rows.write(kv_cache, slots, rows[: slots.shape[0]])

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend, request by request.

        Args:    q: [T, N, R] absorbed queries of all requests, or their two parts.
                 kv_c_and_k_pe_cache: [blocks, block tokens, R].
        Returns: [T, N, L], and no log-sum-exp.
        """
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        selected = self.topk_indices_buffer
        out = queries.new_zeros(queries.shape[0], self.num_heads, self.kv_lora_rank)
        for request in range(attn_metadata.num_reqs):
            begin, end = attn_metadata.starts[request : request + 2]
            most = min(attn_metadata.seq_lens[request], selected.shape[1])
            for first in range(begin, end, QUERIES_AT_ONCE):
                some = slice(first, min(end, first + QUERIES_AT_ONCE))
                what = (kv_c_and_k_pe_cache, attn_metadata, request, selected[some, :most])
                how = (self.scale, self.kv_lora_rank)
                parts = self.rows.parts(*what)
                if parts is not None:
                    out[some] = sparse_math.attention_in_parts(queries[some], parts, *how)
                    continue
                rows, valid = self.rows.read(*what), selected[some, :most] >= 0
                out[some] = sparse_math.attention(queries[some], rows, valid, *how)
        return out, None


def indexer_forward(
    self: Any, hidden_states: torch.Tensor, qr: torch.Tensor, positions: torch.Tensor, rotary: Any
) -> torch.Tensor:
    """Write the step's index keys and select; replaces `Indexer.forward` of vLLM's deepseek_v2.

    The projections are the ones of the method it replaces; the rest is in `sparse_math`.

    Args:    hidden_states: [T, hidden]; qr: [T, q_lora_rank]; positions: [T], all requests.
             rotary: the rotary embedding of the indexer.
    Returns: the buffer that the layer's attention reads: [max tokens, K] int32, -1 for none.
    """
    queries, keys, weights = _projected(self, hidden_states, qr, positions, rotary)
    metadata = get_forward_context().attn_metadata
    buffer: torch.Tensor = self.topk_indices_buffer
    if metadata is None:  # a trial run before there is a cache
        return buffer
    step: SparseMetadata = metadata[self.k_cache.prefix]
    cache = self.k_cache.kv_cache
    num_tokens = step.num_actual_tokens
    sparse_math.write_index_keys(cache, step.slot_mapping[:num_tokens], keys[:num_tokens])
    buffer[:num_tokens] = -1
    for request in range(step.num_reqs):
        begin, end = step.starts[request : request + 2]
        known = torch.arange(step.seq_lens[request])
        slots = sparse_math.slots_of(step.block_table[request], known, step.block_size)
        scores = sparse_math.index_scores(
            queries[begin:end],
            weights[begin:end],
            sparse_math.read_index_keys(cache, slots),
            positions[begin:end],
        )
        chosen = sparse_math.selection(scores, self.topk_tokens)
        buffer[begin:end, : chosen.shape[1]] = chosen
    return buffer


def _projected(
    indexer: Any, hidden: torch.Tensor, qr: torch.Tensor, positions: torch.Tensor, rotary: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries [T, H, D], keys [T, D] and scaled weights [T, H] of the step's tokens."""
    rope, plain = indexer.rope_dim, indexer.head_dim - indexer.rope_dim
    queries = indexer.wq_b(qr)[0].view(-1, indexer.n_head, indexer.head_dim)
    fused = indexer.wk_weights_proj(hidden)[0]
    keys = indexer.k_norm(fused[:, : indexer.head_dim])
    q_rope, q_plain = queries.split((rope, plain), dim=-1)
    k_rope, k_plain = keys.split((rope, plain), dim=-1)
    q_rope, k_rope = rotary(positions, q_rope, k_rope.unsqueeze(1))
    queries = torch.cat((q_rope.reshape(-1, indexer.n_head, rope), q_plain), dim=-1)
    keys = torch.cat((k_rope.reshape(-1, rope), k_plain), dim=-1)
    weights = fused[:, indexer.head_dim :].float()
    return queries, keys, weights * indexer.softmax_scale * indexer.n_head_scale


def install() -> None:
    """Give vLLM's CPU platform sparse attention; a second call changes nothing.

    Raises: UnknownEngineError for a vLLM that kvd does not know; then nothing is changed.
    """
    need_known_vllm()
    if hasattr(CpuPlatform, _MARK):
        return
    setattr(CpuPlatform, _MARK, True)
    dense = CpuPlatform.get_attn_backend_cls

    def choose(
        cls: type, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if attn_selector_config.use_sparse:
            return f"{SparseBackend.__module__}.{SparseBackend.__qualname__}"
        return str(dense(selected_backend, attn_selector_config, num_heads))

    flat = RotaryEmbedding.forward_cpu

    def rotate(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> Any:
        rotated = self.forward_native if query.dim() > 2 else flat.__get__(self)
        return rotated(positions, query, key)

    RotaryEmbedding.forward_cpu = rotate
    CpuPlatform.get_attn_backend_cls = classmethod(choose)
    checked = with_own_settings(CpuPlatform.check_and_update_config)
    CpuPlatform.check_and_update_config = classmethod(checked)
    deepseek_v2.DeepseekV32IndexerCache.get_attn_backend = lambda _: IndexBackend
    deepseek_v2.Indexer.forward = indexer_forward
