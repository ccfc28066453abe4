"""One copy in each direction, and only descriptions on the sockets: by counting; the bench."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.copy_meter import CopyMeter
from bench.layerwise_rig import Rig, Shape

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("checksums", ["off", "always"])
def test_a_layer_is_copied_once_and_never_sent(checksums: str) -> None:
    shape = Shape(16 << 10, layers=6, blocks=32, buffers=4, checksums=checksums)
    with Rig(shape) as rig:
        rig.memory.write_bytes(0, bytes(range(256)) * 64)
        for run in (rig.save, rig.load):
            with CopyMeter() as meter:
                run()
            assert meter.kernel_bytes == shape.step_bytes
            assert 0 < meter.socket_bytes < shape.step_bytes // 100
        figures = rig.pipeline.figures()
        assert figures.saved_bytes == 2 * shape.step_bytes
        assert figures.loaded_bytes == shape.step_bytes


def test_the_meter_counts_only_while_it_is_entered() -> None:
    shape = Shape(4 << 10, layers=2, blocks=4, buffers=2, lookahead=1)
    with Rig(shape) as rig:
        with CopyMeter() as meter:
            pass
        rig.save()
        assert (meter.kernel_bytes, meter.socket_bytes) == (0, 0)


@pytest.mark.slow
def test_the_layerwise_bench_writes_a_row_for_each_figure(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "bench.layerwise", "--small", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--json", str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(path.read_text())
    figures = {(row["case"], row["metric"]) for row in rows}
    assert ("save 64 x 144 KiB, checksums off", "rate to memcpy") in figures
    assert ("load 64 x 144 KiB, checksums always", "copies of a byte, - 1") in figures
    assert ("compute 1.5 transfers, B = 4, lookahead 3", "exposed delay of a layer") in figures
    assert len(figures) == len(rows)
    assert all(row["ok"] for row in rows if row["unit"] == ""), (
        "counts do not depend on the machine"
    )
