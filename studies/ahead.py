"""Compile the kernels of implementations/triton_flash.py without a GPU, and check that they fit the limits of GPUs.

`nox -s triton` runs this and renews results/gallery/gpu/shared_memory.md. Any version of Triton will do.

A launch fails if a kernel needs more shared memory than the GPU gives to one thread block. Each kernel is compiled for
each head width and dtype. The compiler may assume that strides and addresses are multiples of 16, as in dense tensors:
it then loads tiles in advance, which takes the most memory.

Sources: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities (limits), and
https://triton-lang.org/main/python-api/triton.html.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import sys
import tokenize
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import typer

from attnbench.implementations import triton_flash

LIMITS = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}
"""Largest shared memory of a thread block in bytes, by compute capability (80 is 8.0); 12.0 has the limit of 8.9."""
TENSOR_COLUMNS = 512
"""Number of columns of tensor memory, a kind of memory that GPUs of compute capability 10.0 have."""
WIDTHS = (16, 32, 64, 128, 256)
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
KERNELS = ("flash_fwd_tile", "flash_bwd_keys", "flash_bwd_queries")
FLOATS = ("LSE", "DELTA")
"""Names of the kernels' tensor parameters that are in float32 for every dtype."""
SOURCE = Path(triton_flash.__file__)
PAGE = "shared_memory.md"


class Cell(NamedTuple):
    """One compilation: a kernel for a dtype, a head width, a compute capability, and a causal mask or none."""

    kernel: str
    dtype: str
    width: int
    capability: int
    is_causal: bool


class Need(NamedTuple):
    """Resources of a compiled kernel: bytes of shared memory, columns of tensor memory, and rows of its tiles."""

    shared_bytes: int
    columns: int
    rows: int

    def fits(self, capability: int) -> bool:
        """Return whether a GPU of this compute capability can launch the kernel."""
        return self.shared_bytes <= LIMITS[capability] and self.columns <= TENSOR_COLUMNS


def cells() -> Iterator[Cell]:
    """Yield every combination of kernel, dtype, head width, compute capability and mask."""
    for choice in product(KERNELS, DTYPES, WIDTHS, LIMITS, (True, False)):
        yield Cell(*choice)


def need(cell: Cell) -> Need:
    """Compile a kernel for a GPU, which need not be present, and return the resources that the kernel needs.

    Raises:
        Exception: the kernel does not compile.
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
    """Return a short hash of the `@jit` functions of a source text and their docstrings, but not of their comments."""
    kernels = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(each) == "jit" for each in node.decorator_list)
    ]
    texts = (ast.get_source_segment(source, kernel) or "" for kernel in kernels)
    words = (word for text in texts for word in tokenize.generate_tokens(StringIO(text).readline))
    code = [word.string for word in words if word.type not in {tokenize.COMMENT, tokenize.NL}]  # alike in any Python
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:12]


def page(needs: dict[Cell, Need], version: str) -> str:
    """Build the Markdown page with each kernel's shared memory: the larger of its causal and its unmasked form."""
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
    """Compile all kernels and write the page; return 1 if a kernel exceeds the limits of its GPU, else 0."""
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
