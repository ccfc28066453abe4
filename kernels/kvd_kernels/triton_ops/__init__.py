"""Operations of sparse decode as Triton kernels, for CUDA and for Ascend (triton-ascend).

* `residency`: scores to the best k and whether each has a slot; slots for those that have none.
* `rows`: the bytes of selected rows, from host memory that the device can read to their slots.

What each means is defined in `kvd_kernels.residency_reference` and `kvd_kernels.rows_reference`.
Arguments are torch tensors that are checked before anything is launched; an operation allocates
nothing and waits for nothing, so it can be captured in a graph. No program reads what a program
of the same launch wrote: the end of a launch is the only barrier.

With `TRITON_INTERPRET=1`, set before the import, Triton's interpreter runs them on the CPU.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("triton") is None:
    raise ImportError(
        "kvd_kernels.triton_ops needs the Python package triton: for CUDA it comes with torch, for "
        "Ascend it is in triton-ascend (python -m pip install triton, or triton-ascend)",
        name="triton",
    )
