"""Which host this is: two processes with the same kernel boot id share its memory."""

from __future__ import annotations

from pathlib import Path


def kernel_boot_id() -> str:
    """The boot id of the running kernel; the same in every namespace and container of the host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
