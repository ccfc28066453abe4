"""Sparse decode offload with scheduler and ranks in processes of their own."""

from __future__ import annotations

import signal
from typing import Any, Final

import pytest

from tests.vllm.child import Child, Round
from tests.vllm.engines import Answer, assert_same, prompt
from tests.vllm.sparse_node import HOW, SparseNode

pytestmark = pytest.mark.timeout(400)  # engines of several processes start in a minute under load

NEW_TOKENS: Final = 12


def asked() -> list[list[int]]:
    """Three requests, one of several chunks."""
    return [prompt(57, 500), prompt(58, 130), prompt(59, 1)]


def test_two_ranks_share_a_region_that_one_of_them_writes() -> None:
    how: dict[str, Any] = HOW | {"tensor_parallel_size": 2}
    rounds = [Round(asked(), NEW_TOKENS)] * 2
    with Child("glm_moe_dsa", how, rounds, processes=True) as child:
        child.wait_ready()
        stock = [child.answers(), child.answers()]
    with SparseNode() as node:
        arguments = how | {"kv_transfer_config": node.sparse()}
        with Child("glm_moe_dsa", arguments, rounds, processes=True) as child:
            child.wait_ready()
            got: list[list[Answer]] = [child.answers()]
            (seen,) = (one for one in node.engines() if one["members"])
            got.append(child.answers())
    for mine, other in zip(got, stock, strict=True):
        assert_same(mine, other)
        assert [one.num_cached for one in mine] == [one.num_cached for one in other]
    assert {member["member"] for member in seen["members"]} == {"scheduler", "worker0", "worker1"}
    assert len(seen["regions"]) == 1


def test_two_ranks_get_a_region_anew_that_kvd_has_lost() -> None:
    how: dict[str, Any] = HOW | {"tensor_parallel_size": 2}
    rounds = [Round(asked(), NEW_TOKENS)] * 3
    with Child("glm_moe_dsa", how, rounds[:1], processes=True) as child:
        child.wait_ready()
        stock = child.answers()
    with SparseNode() as node:
        arguments = how | {"kv_transfer_config": node.sparse(policy="recompute")}
        with Child("glm_moe_dsa", arguments, rounds, processes=True, waits=True) as child:
            child.wait_ready()
            assert_same(child.answers(), stock)
            node.stop(signal.SIGKILL)
            node.start()
            child.go_on()  # whether all three members know the other kvd already is left to chance
            assert_same(child.answers(), stock, 4)
            child.go_on()
            assert_same(child.answers(), stock, 4)
            (seen,) = (one for one in node.engines() if one["members"])
    assert len(seen["regions"]) == 1
