"""How many CPU threads the reference engine uses: decided by whoever starts it, not on import.

One thread per rank is right unless the host is idle: torch's threads meet after every operation,
and on cores that others use too they wait for each other longer than they work. The number of
threads changes no bit of any result.
"""

from __future__ import annotations

import torch


def configure_threads(num_threads: int) -> None:
    """Let torch use `num_threads` threads in this process; give each rank its share of the cores.

    Raises: ValueError if num_threads is below 1.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}; give 1 or more")
    torch.set_num_threads(num_threads)
