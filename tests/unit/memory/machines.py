"""Machines that are directories: their `proc` and `sys` written by a test."""

from __future__ import annotations

from pathlib import Path

from kvd.core.units import GIB, KIB
from kvd.memory.memory_info import MemoryInfo, read_memory_info


def write(root: Path, files: dict[str, str]) -> None:
    """Write files below a root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def machine(root: Path, mounts: str, member: str, files: dict[str, str]) -> None:
    """Write a machine of 64 GiB with these control groups."""
    write(
        root,
        {
            "proc/meminfo": "MemTotal: 67108864 kB\nMemFree: 1024 kB\nMemAvailable: 33554432 kB\n"
            "HugePages_Total: 7\nHugepagesize: 2048 kB\n",
            "proc/self/mountinfo": mounts,
            "proc/self/cgroup": member,
            **files,
        },
    )


def two_nodes(root: Path, *, allowed: str = "", host_available: int = 32 * GIB) -> MemoryInfo:
    """A machine with memory on nodes 0 and 2; node 1 has processors only.

    Node 0 has 20 GiB to give, node 2 has 5 GiB; of 80 free huge pages 50 are promised.
    """
    nodes = "sys/devices/system/node"
    pool = "hugepages/hugepages-2048kB"
    files = {
        f"{nodes}/has_memory": "0,2\n",
        f"{nodes}/online": "0-2\n",
        "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "150\n",
        "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "80\n",
        "sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages": "50\n",
        "proc/meminfo": f"MemTotal: {64 * GIB // KIB} kB\n"
        f"MemAvailable: {host_available // KIB} kB\nHugepagesize: 2048 kB\n",
    }
    for number, free, cache, total, pages in ((0, 16, 4, 50, 20), (2, 4, 1, 100, 60)):
        files[f"{nodes}/node{number}/meminfo"] = (
            f"Node {number} MemTotal:       {32 * GIB // KIB} kB\n"
            f"Node {number} MemFree:        {free * GIB // KIB} kB\n"
            f"Node {number} Inactive(file): {(cache - 1) * GIB // KIB} kB\n"
            f"Node {number} SReclaimable:   {2 * GIB // KIB} kB\n"
            f"Node {number} HugePages_Free: {pages}\n"
        )
        files[f"{nodes}/node{number}/{pool}/nr_hugepages"] = f"{total}\n"
        files[f"{nodes}/node{number}/{pool}/free_hugepages"] = f"{pages}\n"
    if allowed:
        files["proc/self/status"] = f"Name:\tkvd\nMems_allowed:\t7\nMems_allowed_list:\t{allowed}\n"
    machine(root, "", "", files)
    return read_memory_info(root)
