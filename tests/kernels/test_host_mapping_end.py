"""The end of a mapping: it waits for copies, and a forked child has none."""

from __future__ import annotations

import subprocess
import sys
import threading
from array import array
from collections.abc import Callable

import pytest

from kvd_kernels.host import Mapping, copy_spans

MakeRegion = Callable[..., Mapping]
MakeMemfd = Callable[..., int]

MIB = 1 << 20


def start_copy(dst: Mapping, src: Mapping) -> threading.Thread:
    """Start a copy of all of src in a thread; return once its first bytes have landed."""
    spans = array("Q", [0, 0, src.size])
    thread = threading.Thread(target=copy_spans, args=(dst, src, spans))
    thread.start()
    while thread.is_alive() and not dst.load_u64(0):
        pass
    return thread


@pytest.mark.slow
def test_close_waits_for_a_copy_in_flight(make_memfd: MakeMemfd, make_region: MakeRegion) -> None:
    size = 128 * MIB
    src = make_region(size)
    src.write_bytes(0, b"\1" * size)
    for _ in range(20):
        fd = make_memfd(size)
        dst, witness = Mapping(fd, size, writable=True), Mapping(fd, size, writable=False)
        witness.populate(0, size)
        thread = start_copy(dst, src)
        in_flight = witness.load_u64(size - 8) == 0
        dst.close()
        assert dst.closed
        assert witness.load_u64(size - 8) != 0
        thread.join()
        if in_flight:
            return
    pytest.fail("no copy of 128 MiB was ever caught in flight")


@pytest.mark.slow
def test_other_threads_run_during_a_copy(make_region: MakeRegion) -> None:
    size = 256 * MIB
    src, dst = make_region(size), make_region(size)
    src.write_bytes(0, b"\1" * size)
    dst.populate(0, size)
    thread = start_copy(dst, src)
    steps = 0
    while not dst.load_u64(size - 8) and thread.is_alive():
        steps += 1
    thread.join()
    # With the interpreter lock held, this thread would see nothing between start and end.
    assert steps > 100


_FORK_SCRIPT = """
import os
from kvd_kernels.host import GateWaiter, Mapping
fd = os.memfd_create("fork")
os.ftruncate(fd, 4096)
region = Mapping(fd, 4096, writable=True)
view = region.view()
gate = GateWaiter(region, os.eventfd(0), os.pipe()[0])
child = os.fork()
if child == 0:
    refused = 0
    for use in (lambda: region.load_u64(0), lambda: gate.wait_free(0, 0, 0), gate.hung_up):
        try:
            use()
        except ValueError as error:
            refused += "parent process" in str(error)
    region.close()
    gate.close()
    closed = region.closed
    del view, region, gate, use
    os._exit(0 if refused == 3 and closed else 2)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
region.store_u64(0, 5)
assert region.load_u64(0) == 5 and not region.closed and not gate.hung_up()
raise SystemExit(status)
"""


@pytest.mark.slow
def test_a_forked_child_is_refused_and_harms_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", _FORK_SCRIPT], check=False, timeout=60)
    assert done.returncode == 0
