"""The options of a connector: `kv_connector_extra_config` of `--kv-transfer-config`.

The keys of the layerwise guide are taken as they are. What cannot be meant is refused at start,
with the key, its value and what it may be; nothing is corrected silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeGuard

from engine_shim.client import ClientOptions
from engine_shim.client.options import DEADLINE_S_MAX
from engine_shim.vllm import sparse_options
from engine_shim.vllm.errors import OptionError
from engine_shim.vllm.sparse_options import SparseOptions, parse_sparse

PREFIX: Final = "kv_connector_extra_config"

Offload = Literal["auto", "rolling", "resident"]
OnUnavailable = Literal["fail", "recompute"]

SHARED_MAX: Final = 1024
SPARES_MAX: Final = 8
AHEAD_MAX: Final = 1023
DEADLINE_MAX_S: Final = 3600.0

BUFFERS_ADVISED: Final = (2, 4)

WITHOUT_EFFECT: Final = frozenset(
    {
        "consumer_is_to_load",
        "consumer_is_to_put",
        "discard_partial_chunks",
        "h2d_stagger_us",
        "layerwise_max_transfer_blocks",
        "layerwise_max_transfer_bytes",
        "load_async",
        "lookup_rpc_port",
        "mooncake_rpc_port",
        "prefill_tp_size",
        "decode_tp_size",
        "save_decode_cache",
    }
)
"""Keys of other connectors that mean nothing here; they are named in a warning, not refused."""


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """What a user can choose; the defaults are those of the guide.

    backend:        store of kvd.toml, '' for kvd's default.
    num_shared:     buffers that the layers of a bucket share, None for one each (no reuse).
    independent:    layers with a buffer of their own; negatives count from the end.
    prefetch:       layers ahead that a load may start.
    onload_map:     the same for each layer, None for `prefetch` everywhere.
    spare_buffers:  extra buffers of each bucket, for quarantined ones.
    offload:        whether layers share buffers: auto decides by what fits.
    on_unavailable: what becomes of requests while kvd cannot be reached.
    runtime_dir:    kvd's runtime directory, '' for what the environment says.
    deadline_s:     longest time that a step, or a request for the pool, waits.
    sparse:         sparse decode offload, None without.
    ignored:        keys without effect that were given.
    """

    backend: str = ""
    num_shared: int | None = None
    independent: tuple[int, ...] | Literal["all"] = (0,)
    prefetch: int = 1
    onload_map: tuple[int, ...] | None = None
    spare_buffers: int = 1
    offload: Offload = "auto"
    on_unavailable: OnUnavailable = "fail"
    runtime_dir: str = ""
    deadline_s: float = 30.0
    sparse: SparseOptions | None = None
    ignored: tuple[str, ...] = ()

    @property
    def lookahead(self) -> int | tuple[int, ...]:
        """How many layers ahead each load may start."""
        return self.prefetch if self.onload_map is None else self.onload_map


KEYS: Final = (
    "backend",
    "use_layerwise",
    "layerwise_num_shared_buffers",
    "layerwise_independent_layers",
    "layerwise_prefetch_layers",
    "onload_layer_map",
    "spare_buffers",
    "offload",
    "on_unavailable",
    "kvd_runtime_dir",
    "kvd_deadline_s",
    sparse_options.KEY,
)


def parse_options(extra: Mapping[str, object]) -> ConnectorOptions:
    """Read the options.

    Args: extra: `kv_connector_extra_config`; keys of MultiConnector and vLLM itself are not in it.
    Raises: OptionError for the first key that cannot be used.
    """
    for key in extra:
        if key not in KEYS and key not in WITHOUT_EFFECT:
            near = difflib.get_close_matches(key, KEYS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(KEYS)}"
            raise OptionError(f"{PREFIX}.{key} is not known; {hint}")
    if "onload_layer_map" in extra and "layerwise_prefetch_layers" in extra:
        raise OptionError(
            f"{PREFIX}: onload_layer_map and layerwise_prefetch_layers say the same thing; "
            "give one of them"
        )
    given = _Given(extra)
    given.layerwise()
    sparse = parse_sparse(extra.get(sparse_options.KEY), f"{PREFIX}.{sparse_options.KEY}")
    return ConnectorOptions(
        backend=given.text("backend"),
        num_shared=given.optional_count("layerwise_num_shared_buffers", 1, SHARED_MAX),
        independent=given.layers("layerwise_independent_layers"),
        prefetch=given.count("layerwise_prefetch_layers", 1, 1, AHEAD_MAX),
        onload_map=given.optional_counts("onload_layer_map", 0, AHEAD_MAX),
        spare_buffers=given.count("spare_buffers", 1, 0, SPARES_MAX),
        offload=given.offload(),
        on_unavailable=given.on_unavailable(),
        runtime_dir=given.text("kvd_runtime_dir"),
        deadline_s=given.seconds("kvd_deadline_s", 30.0, DEADLINE_MAX_S),
        sparse=sparse,
        ignored=tuple(sorted(WITHOUT_EFFECT.intersection(extra))),
    )


def client_options(options: ConnectorOptions) -> ClientOptions:
    """How the connector's clients behave: a kvd that went away may come back at any time."""
    return ClientOptions(
        deadline_s=options.deadline_s,
        connect_deadline_s=options.deadline_s,
        reconnect_deadline_s=DEADLINE_S_MAX,
    )


def buffer_warning(num_shared: int | None, buffer_bytes: int) -> str:
    """What to warn of when the number of shared buffers is unusual, '' when it is not.

    buffer_bytes: of one shared buffer.
    """
    low, high = BUFFERS_ADVISED
    if num_shared is None or low <= num_shared <= high:
        return ""
    mib = buffer_bytes / (1 << 20)
    if num_shared < low:
        why = "with one buffer nothing is loaded while a layer computes: transfers are never hidden"
    else:
        why = "more than four buffers hide no more of the transfers and cost device memory each"
    return (
        f"{PREFIX}.layerwise_num_shared_buffers is {num_shared}, {mib:,.1f} MiB each and "
        f"{num_shared * mib:,.1f} MiB in all; {low} to {high} are useful: {why}"
    )


class _Given:
    """Reads values of the right kind, or says what is wrong with them."""

    def __init__(self, extra: Mapping[str, object]) -> None:
        self._extra = extra

    def text(self, key: str) -> str:
        value = self._extra.get(key, "")
        if not isinstance(value, str) or (key in self._extra and not value):
            raise self._wrong(key, "a text that is not empty")
        return value

    def layerwise(self) -> None:
        """The guide's switch: there is no other way than by layers here."""
        if self._extra.get("use_layerwise", True) is not True:
            raise self._wrong("use_layerwise", "true, or leave it out: kvd works layer by layer")

    def count(self, key: str, default: int, least: int, most: int) -> int:
        value = self._extra.get(key, default)
        if not _is_count(value, least, most):
            raise self._wrong(key, f"a whole number from {least} to {most}")
        assert isinstance(value, int)
        return value

    def optional_count(self, key: str, least: int, most: int) -> int | None:
        return self.count(key, least, least, most) if key in self._extra else None

    def optional_counts(self, key: str, least: int, most: int) -> tuple[int, ...] | None:
        if key not in self._extra:
            return None
        values = self._extra[key]
        if not _is_list(values) or not all(_is_count(value, least, most) for value in values):
            raise self._wrong(key, f"a list of one whole number from {least} to {most} a layer")
        return tuple(values)

    def layers(self, key: str) -> tuple[int, ...] | Literal["all"]:
        value = self._extra.get(key, [0])
        if isinstance(value, str) and value.strip().lower() == "all":
            return "all"
        if not _is_list(value) or not all(type(layer) is int for layer in value):
            raise self._wrong(
                key, 'a list of layer numbers (negatives count from the end) or "all"'
            )
        return tuple(value)

    def offload(self) -> Offload:
        match self._extra.get("offload", "auto"):
            case "auto" | "rolling" | "resident" as value:
                return value
        raise self._wrong("offload", "auto, rolling or resident")

    def on_unavailable(self) -> OnUnavailable:
        match self._extra.get("on_unavailable", "fail"):
            case "fail" | "recompute" as value:
                return value
        raise self._wrong("on_unavailable", "fail or recompute")

    def seconds(self, key: str, default: float, most: float) -> float:
        value = self._extra.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            raise self._wrong(key, f"seconds, more than 0 and at most {most:.0f}")
        return float(value)

    def _wrong(self, key: str, may_be: str) -> OptionError:
        return OptionError(f"{PREFIX}.{key} is {self._extra.get(key)!r}; give {may_be}")


def _is_count(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
