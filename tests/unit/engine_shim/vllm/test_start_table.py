"""The lines that users read at start, word for word."""

from __future__ import annotations

from engine_shim.vllm.start_table import about, merge_line, start_table, summary
from kvd.wire.protocol import ABOUT_CHARS_MAX
from tests.unit.engine_shim.vllm.plans import indexer, main, mains, plan

BIG = [main(layer, 1 << 16) for layer in range(8)]


def test_a_merge_is_said_as_the_guide_says_it() -> None:
    made = plan([*mains(27), *(indexer(layer) for layer in range(27))], num_shared=6)
    assert merge_line(made) == (
        "Layerwise KV cache reuse merged 54 descriptors into 14 descriptors using 7 buffer "
        "assignments."
    )


def test_rolling_in_one_line() -> None:
    assert summary(plan(mains(8), pool_blocks=20, num_shared=2)) == (
        "rolling: 8 layers on 3 buffers (1 bound, 2 shared, 1 spare), 21 blocks instead of 40 "
        "(bounded by pool bytes)"
    )
    assert summary(plan(mains(8), pool_blocks=20, num_shared=2, spare_buffers=0)) == (
        "rolling: 8 layers on 3 buffers (1 bound, 2 shared), 21 blocks instead of 40 "
        "(bounded by pool bytes)"
    )


def test_resident_in_one_line() -> None:
    made = plan(mains(8), offload="resident")
    assert summary(made) == "resident: 8 layers with a buffer each, 40 blocks"


def test_what_kvd_shows_is_short() -> None:
    told = about(plan(mains(8), offload="resident"), "x" * 10_000)
    assert told["connector"] == "x" * ABOUT_CHARS_MAX
    assert told["why"] == "offload is resident"


def test_the_table_of_a_rolling_engine() -> None:
    made = plan(BIG, blocks=41, pool_blocks=60, num_shared=2, spare_buffers=0)
    assert start_table(made, 4096).splitlines() == [
        "kvd: KV cache is rolling: offload is rolling; blocks are bounded by pool bytes",
        "                                one buffer a layer    rolling",
        "  device, all blocks                     122.0 MiB   45.8 MiB",
        "  device, one block                        2.0 MiB    0.8 MiB",
        "  host, all blocks                         0.0 MiB  120.0 MiB",
        "  blocks in this device memory                  41         61",
        "  tokens that fit                              160        240",
        "  largest chunk now                            160        240",
    ]


def test_the_table_of_a_resident_engine() -> None:
    made = plan(BIG, blocks=41, offload="resident")
    assert start_table(made, 64).splitlines()[-3:] == [
        "  blocks in this device memory                  41        41",
        "  tokens that fit                              160       160",
        "  largest chunk now                             64        64",
    ]
