"""Compile every Triton kernel of implementations/ ahead of time, without a GPU, and compare its needs with each GPU's.

Command: `nox -s triton`, which renews results/gallery/gpu/shared_memory.md; only Triton is needed, in any version. A
launch fails if a kernel needs more shared memory than a block may have, so each width and dtype is compiled as a launch
with dense tensors would compile it: strides and addresses that are multiples of 16 let the compiler load tiles ahead,
which needs more memory.

Sources: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities (limits), and
https://triton-lang.org/main/python-api/triton.html.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import typer

from attnbench.implementations import triton_flash

LIMITS = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}
"""Bytes of shared memory that a block may have, by compute capability; 12.0 has the limit of 8.9."""
TENSOR_COLUMNS = 512
"""Columns of the tensor memory, which compute capability 10.0 has."""
WIDTHS = (16, 32, 64, 128, 256)
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
KERNELS = ("flash_fwd_tile", "flash_bwd_keys", "flash_bwd_queries")
FLOATS = ("LSE", "DELTA")
"""Parameters that are always in float32."""
SOURCE = Path(triton_flash.__file__)
PAGE = "shared_memory.md"


class Cell(NamedTuple):
    """A kernel as it is compiled."""

    kernel: str
    dtype: str
    width: int
    capability: int
    is_causal: bool


class Need(NamedTuple):
    """Bytes of shared memory and columns of tensor memory that a kernel needs, and the rows of its tiles."""

    shared_bytes: int
    columns: int
    rows: int

    def fits(self, capability: int) -> bool:
        """Whether a GPU of this compute capability can launch it."""
        return self.shared_bytes <= LIMITS[capability] and self.columns <= TENSOR_COLUMNS


def cells() -> Iterator[Cell]:
    """All cells."""
    for choice in product(KERNELS, DTYPES, WIDTHS, LIMITS, (True, False)):
        yield Cell(*choice)


def need(cell: Cell) -> Need:
    """Compile a kernel for a GPU, which need not be present; return the resources that the kernel needs.

    Raises:
        Exception: it does not compile.
    """
    import torch
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(triton_flash, cell.kernel)
    query = torch.empty(1, 1, 1, cell.width, dtype=getattr(torch, cell.dtype), device="meta")
    constants: dict[str, Any] = triton_flash.constants(query, is_causal=cell.is_causal)
    signature, attributes = {}, {}
    for place, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr or name.endswith("_d"):  # a stride of 1 is a constant, too
            signature[name] = "constexpr"
            constants.setdefault(name, 1)
            continue
        if name.isupper():
            signature[name] = f"*{DTYPES['float32' if name in FLOATS else cell.dtype]}"
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
        if name not in {"scale", "group"}:
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    found = compile_kernel(source, target=GPUTarget("cuda", cell.capability, 32)).metadata
    return Need(found.shared, getattr(found, "tmem_size", None) or 0, triton_flash.block(query))


def digest(source: str) -> str:
    """A digest of the kernels in a file, unaffected by comments and other functions."""
    kernels = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(each) == "jit" for each in node.decorator_list)
    ]
    return hashlib.sha256("\n".join(map(ast.dump, kernels)).encode()).hexdigest()[:12]


def page(needs: dict[Cell, Need], version: str) -> str:
    """The table, with the larger need of causal and not causal."""
    limits = ", ".join(f"{limit:,} on sm_{capability}" for capability, limit in LIMITS.items())
    lines = [
        "# Shared memory of the Triton kernels",
        "",
        f"Bytes for each block, compiled ahead of time by Triton {version}, without a GPU: `nox -s triton`.",
        f"A block may have {limits}. Rows are those of a tile. No kernel was launched.",
        "",
        f"Kernels of triton_flash.py: {digest(SOURCE.read_text(encoding='utf-8'))}",
        "",
        f"| kernel | dtype | width | rows | {' | '.join(f'sm_{capability}' for capability in LIMITS)} |",
        f"| --- | --- | --- | --- |{' --- |' * len(LIMITS)}",
    ]
    for kernel, dtype, width in product(KERNELS, DTYPES, WIDTHS):
        numbers = []
        for capability in LIMITS:
            found = [needs[Cell(kernel, dtype, width, capability, is_causal)] for is_causal in (True, False)]
            largest = max(each.shared_bytes for each in found)
            numbers.append(f"{largest:,}" if all(each.fits(capability) for each in found) else f"**{largest:,}**")
        lines.append(f"| {kernel} | {dtype} | {width} | {found[0].rows} | {' | '.join(numbers)} |")
    return "\n".join([*lines, ""])


def main() -> int:
    """Compile all cells, and write the page; return 1 if one does not fit."""
    import triton

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the page")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    every = list(cells())
    with ProcessPoolExecutor(given.jobs) as pool:
        needs = {}
        for cell, found in zip(every, pool.map(need, every), strict=True):
            needs[cell] = found
            typer.echo(f"{cell} {found}")
    (given.to / PAGE).write_text(page(needs, triton.__version__), encoding="utf-8")
    misfits = [cell for cell, found in needs.items() if not found.fits(cell.capability)]
    for cell in misfits:
        typer.echo(f"too large: {cell}, {needs[cell]}", err=True)
    return int(bool(misfits))


if __name__ == "__main__":
    sys.exit(main())
