"""Types of the native module; its docstrings are written in kernels/src/rows/bind_*.cpp."""

from collections.abc import Iterable
from typing import Any, TypeAlias

from numpy.typing import NDArray
from typing_extensions import Buffer

# Types of numpy say only from Python 3.12 on that its arrays are buffers.
Memory: TypeAlias = Buffer | NDArray[Any]

class HoleError(ValueError): ...

class BlockTables:
    def __init__(
        self,
        tables: Memory,
        written: Memory,
        *,
        block_tokens: int,
        num_blocks: int,
        rows: Memory | None = None,
    ) -> None: ...
    def written(self, request: int, layer: int) -> int: ...
    def mark_written(self, request: int, layer: int, tokens: int) -> None: ...
    def truncate(self, request: int, tokens: int) -> None: ...

class RowList:
    def __init__(
        self, positions: Memory, slots: Memory, sources: Iterable[Memory] = ()
    ) -> None: ...

class RowCopier:
    def __init__(
        self,
        tables: BlockTables,
        parts: Iterable[tuple[object, ...]],
        *,
        num_slots: int,
        scratch_rows: int = 0,
        kernel: str = "auto",
        threads: int = 1,
    ) -> None: ...
    @property
    def kernel(self) -> str: ...
    def gather(self, rows: RowList, request: int, layer: int, count: int) -> int: ...
    def read(
        self, rows: RowList, request: int, layer: int, count: int, *, far: bool = True
    ) -> int: ...
    def append(self, rows: RowList, request: int, layer: int, count: int) -> int: ...

class SparseAttention:
    def __init__(
        self,
        copier: RowCopier,
        *,
        queries: Memory,
        places: Memory,
        items: Memory,
        positions: Memory,
        slots: Memory,
        output: Memory,
        element: str,
        scale: float,
        threads: int = 2,
        spin_ns: int = 50000,
    ) -> None: ...
    def attend(self, layer: int, batch: int, *, ordered: bool = False) -> None: ...
    def times(self) -> tuple[int, int, int, int, int]: ...

class IndexScorer:
    def __init__(
        self,
        tables: BlockTables,
        keys: Memory,
        *,
        queries: Memory,
        weights: Memory,
        scores: Memory,
        offset: int = 0,
        layer_stride: int,
        block_stride: int,
        row_bytes: int,
        element: str,
        kernel: str = "auto",
    ) -> None: ...
    def score(self, query: int, request: int, layer: int, tokens: int) -> None: ...

def row_kernels() -> list[str]: ...
