"""The connector's options: the guide's JSON as it is, and every way to get a key wrong."""

from __future__ import annotations

import json
import math

import pytest

from engine_shim.vllm.errors import OptionError
from engine_shim.vllm.options import (
    AHEAD_MAX,
    DEADLINE_MAX_S,
    KEYS,
    SHARED_MAX,
    SPARES_MAX,
    WITHOUT_EFFECT,
    ConnectorOptions,
    buffer_warning,
    parse_options,
)
from engine_shim.vllm.sparse_options import KEY
from engine_shim.vllm.sparse_options import KEYS as SPARSE_KEYS

GUIDE = """{
    "backend": "memcache",
    "use_layerwise": true,
    "layerwise_num_shared_buffers": 3,
    "layerwise_independent_layers": [0, -1],
    "layerwise_prefetch_layers": 2,
    "lookup_rpc_port": "0",
    "save_decode_cache": true
}"""

Wrong = tuple[str, list[object]]

NOT_A_TEXT: Wrong = ("a text that is not empty", ["", None, 1, True, ["x"]])
NOT_LAYERWISE: Wrong = (
    "true, or leave it out: kvd works layer by layer",
    ["true", 1, 0, None, False],
)
NOT_A_COUNT: list[object] = [True, 1.0, "1", None, [1]]

WRONG: dict[str, Wrong] = {
    "backend": NOT_A_TEXT,
    "kvd_runtime_dir": NOT_A_TEXT,
    "use_layerwise": NOT_LAYERWISE,
    "layerwise_num_shared_buffers": (
        f"a whole number from 1 to {SHARED_MAX}",
        [*NOT_A_COUNT, 0, -1, SHARED_MAX + 1],
    ),
    "layerwise_prefetch_layers": (
        f"a whole number from 1 to {AHEAD_MAX}",
        [*NOT_A_COUNT, 0, AHEAD_MAX + 1],
    ),
    "spare_buffers": (f"a whole number from 0 to {SPARES_MAX}", [*NOT_A_COUNT, -1, SPARES_MAX + 1]),
    "layerwise_independent_layers": (
        'a list of layer numbers (negatives count from the end) or "all"',
        ["some", "", 0, None, [0.0], [True], ["0"], {"0": 1}],
    ),
    "onload_layer_map": (
        f"a list of one whole number from 0 to {AHEAD_MAX} a layer",
        ["111", 1, None, [True], [-1], [AHEAD_MAX + 1], [1, "1"], b"11"],
    ),
    "offload": ("auto, rolling or resident", ["", "Auto", None, True, ["auto"]]),
    "on_unavailable": ("fail or recompute", ["", "retry", None, False]),
    "kvd_deadline_s": (
        "seconds, more than 0 and at most 3600",
        [0, -1, 3600.1, True, "30", None, math.nan, math.inf],
    ),
    KEY: (f"an object with {', '.join(SPARSE_KEYS)}", [True, "on", []]),
}


def test_every_key_has_its_errors_here() -> None:
    assert set(WRONG) == set(KEYS)


@pytest.mark.parametrize(
    ("key", "value", "may_be"),
    [(key, value, may_be) for key, (may_be, values) in WRONG.items() for value in values],
    ids=repr,
)
def test_a_wrong_value_is_refused_with_what_it_may_be(key: str, value: object, may_be: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_options({key: value})
    assert str(caught.value) == f"kv_connector_extra_config.{key} is {value!r}; give {may_be}"


def test_the_guide_is_taken_as_it_is() -> None:
    assert parse_options(json.loads(GUIDE)) == ConnectorOptions(
        backend="memcache",
        num_shared=3,
        independent=(0, -1),
        prefetch=2,
        ignored=("lookup_rpc_port", "save_decode_cache"),
    )


def test_nothing_given_is_the_defaults() -> None:
    assert parse_options({}) == ConnectorOptions()
    assert ConnectorOptions().lookahead == 1


@pytest.mark.parametrize(
    ("key", "value", "field", "parsed"),
    [
        ("layerwise_num_shared_buffers", 1, "num_shared", 1),
        ("layerwise_num_shared_buffers", SHARED_MAX, "num_shared", SHARED_MAX),
        ("layerwise_prefetch_layers", AHEAD_MAX, "prefetch", AHEAD_MAX),
        ("spare_buffers", 0, "spare_buffers", 0),
        ("spare_buffers", SPARES_MAX, "spare_buffers", SPARES_MAX),
        ("layerwise_independent_layers", [], "independent", ()),
        ("layerwise_independent_layers", " ALL ", "independent", "all"),
        ("layerwise_independent_layers", [-1, 5], "independent", (-1, 5)),
        ("onload_layer_map", [0, AHEAD_MAX], "onload_map", (0, AHEAD_MAX)),
        ("offload", "resident", "offload", "resident"),
        ("on_unavailable", "recompute", "on_unavailable", "recompute"),
        ("kvd_deadline_s", 1, "deadline_s", 1.0),
        ("kvd_deadline_s", DEADLINE_MAX_S, "deadline_s", DEADLINE_MAX_S),
        ("kvd_runtime_dir", "/run/other", "runtime_dir", "/run/other"),
    ],
)
def test_limits_are_allowed(key: str, value: object, field: str, parsed: object) -> None:
    assert getattr(parse_options({key: value}), field) == parsed


def test_a_map_takes_the_place_of_one_distance() -> None:
    assert parse_options({"onload_layer_map": [2, 0, 1]}).lookahead == (2, 0, 1)


def test_both_ways_to_say_the_same_are_refused() -> None:
    both = {"onload_layer_map": [1], "layerwise_prefetch_layers": 1}
    with pytest.raises(OptionError, match=r"say the same thing; give one of them"):
        parse_options(both)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("layerwise_num_shared_buffer", "did you mean layerwise_num_shared_buffers?"),
        ("on_unavailble", "did you mean on_unavailable?"),
        ("kvd_deadline", "did you mean kvd_deadline_s?"),
        ("zzz", "known keys: backend, use_layerwise, "),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(key: str, hint: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_options({key: 1})
    assert str(caught.value).startswith(f"kv_connector_extra_config.{key} is not known; {hint}")


@pytest.mark.parametrize("key", sorted(WITHOUT_EFFECT))
def test_keys_of_other_connectors_are_named_and_not_read(key: str) -> None:
    assert parse_options({key: object()}) == ConnectorOptions(ignored=(key,))


@pytest.mark.parametrize(
    ("num_shared", "why"),
    [(None, ""), (2, ""), (3, ""), (4, ""), (1, "never hidden"), (5, "hide no more")],
)
def test_unusual_numbers_of_buffers_are_warned_of(num_shared: int | None, why: str) -> None:
    warning = buffer_warning(num_shared, 3 << 20)
    assert why in warning
    assert bool(warning) == bool(why)
    if warning:
        assert num_shared is not None
        assert f"3.0 MiB each and {3 * num_shared}.0 MiB in all" in warning
