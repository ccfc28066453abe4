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


SIZE = 8 * MIB
# The first word comes first and the last word last. Copying what lies between many times over takes
# long enough (some 0.2 s) to be caught in between, however late this thread gets its turn.
LONG_COPY = array("Q", [0, 0, 8] + [8, 8, SIZE - 16] * 300 + [SIZE - 8, SIZE - 8, 8])


def begin_long_copy(dst: Mapping, src: Mapping) -> threading.Thread:
    """Start LONG_COPY in a thread; return once its first word has landed."""
    src.write_bytes(0, b"\1" * SIZE)
    thread = threading.Thread(target=copy_spans, args=(dst, src, LONG_COPY))
    thread.start()
    while thread.is_alive() and not dst.load_u64(0):
        pass
    return thread


@pytest.mark.slow
def test_close_waits_for_a_copy_in_flight(make_memfd: MakeMemfd, make_region: MakeRegion) -> None:
    src, fd = make_region(SIZE), make_memfd(SIZE)
    dst, witness = Mapping(fd, SIZE, writable=True), Mapping(fd, SIZE, writable=False)
    thread = begin_long_copy(dst, src)
    assert witness.load_u64(SIZE - 8) == 0, "the copy ended before it could be closed under"
    dst.close()
    assert dst.closed
    assert witness.load_u64(SIZE - 8) != 0
    thread.join()


@pytest.mark.slow
def test_close_of_the_source_waits_too(make_memfd: MakeMemfd, make_region: MakeRegion) -> None:
    src, fd = make_region(SIZE), make_memfd(SIZE)
    dst = Mapping(fd, SIZE, writable=True)
    thread = begin_long_copy(dst, src)
    assert dst.load_u64(SIZE - 8) == 0, "the copy ended before it could be closed under"
    src.close()
    assert dst.load_u64(SIZE - 8) != 0
    thread.join()


@pytest.mark.slow
def test_a_mapping_being_closed_refuses_new_work(make_region: MakeRegion) -> None:
    src, dst = make_region(SIZE), make_region(SIZE)
    copier = begin_long_copy(dst, src)
    closer = threading.Thread(target=dst.close)
    closer.start()
    while not dst.closed:
        pass
    with pytest.raises(ValueError, match="mapping is closed"):
        dst.load_u64(0)
    with pytest.raises(ValueError, match="mapping is closed"):
        copy_spans(dst, src, LONG_COPY)
    dst.close()  # a second close waits as the first does
    copier.join()
    closer.join()


@pytest.mark.slow
def test_other_threads_run_during_a_copy(make_region: MakeRegion) -> None:
    src, dst = make_region(SIZE), make_region(SIZE)
    thread = begin_long_copy(dst, src)
    steps = 0
    while not dst.load_u64(SIZE - 8) and thread.is_alive():
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
