"""Compile every kernel for an sm_90 and print its name: `python compile_kernels.py`.

No device is needed. The interpreter takes what the compiler does not, such as a global of another
kind, so that kernels which only it has seen may run nowhere else. It must be off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvd_kernels.triton_ops import residency_kernels, row_kernels, upkeep_kernels

TARGET: Final = GPUTarget("cuda", 90, 32)
POINTERS: Final = frozenset(
    {
        "blocks", "cache_slots", "codes", "counts", "ends", "faults", "figures", "firsts", "free",
        "lengths", "starts",
        "load_positions", "load_slots", "places", "plan", "positions", "requests", "scratch",
        "stamps", "state", "table_of", "tables", "tokens", "victims", "winners",
    }
)  # fmt: skip
"""Parameters that are addresses of int32s."""


class Shape(NamedTuple):
    """A kernel, types of parameters that are neither such addresses nor numbers, and its sizes."""

    kernel: Any
    types: Mapping[str, str]
    sizes: Mapping[str, int]


SHAPES: Final = (
    Shape(residency_kernels.lim, {"scores": "*fp32"}, {"BLOCK": 2048}),
    Shape(residency_kernels.lim, {"scores": "*bf16"}, {"BLOCK": 2048}),
    Shape(residency_kernels.look_up, {}, {"BLOCK": 2048}),
    Shape(residency_kernels.find_victims, {}, {"BLOCK": 2048}),
    Shape(residency_kernels.place, {}, {"BLOCK": 2048}),
    Shape(upkeep_kernels.admit_row, {}, {"BLOCK": 256}),
    Shape(upkeep_kernels.invalidate, {}, {"BLOCK": 2048}),
    Shape(row_kernels.locate, {"written": "*i64", "slots": "*i32"}, {"BLOCK": 1024}),
    Shape(
        row_kernels.gather_part,
        {"region": "*i64", "hot": "*i64", "slots": "*i32"},
        {"ROWS": 16, "WORDS": 256},
    ),
)


def build(shape: Shape, number: str) -> None:
    """Compile a kernel whose numbers are of a type, or are all 1, which Triton treats apart."""
    types, constants = {}, dict(shape.sizes)
    for name in shape.kernel.arg_names:
        types[name] = shape.types.get(name) or ("*i32" if name in POINTERS else number)
        if name in shape.sizes:
            types[name] = "constexpr"
        elif types[name] == "one":
            types[name], constants[name] = "constexpr", 1
    source = ASTSource(fn=shape.kernel, signature=types, constexprs=constants)
    triton.compile(source, target=TARGET)
    print(shape.kernel.__name__, number)


if __name__ == "__main__":
    for shape in SHAPES:
        wide = ("i64",) if shape.kernel is row_kernels.gather_part else ()
        for number in ("i32", "one", *wide):
            build(shape, number)
