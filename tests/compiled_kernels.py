"""Machine code of Triton's kernels for kinds of GPUs that are not here: what it needs, by Triton's own assembler."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from autopar.rules.attention import attention_triton

NUMBERS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
MASKS = {0: "fp32", 1: "u8", 2: "fp32"}
ONES = ("n_heads", "n_shared", "q_d", "k_d", "v_d", "out_d", "grad_d", "mask_k")
"""Numbers that are mostly 1: Triton makes other code for calls in which an integer is."""


class Needs(NamedTuple):
    """Of a kernel: bytes that a block of threads shares, and bytes of registers that had to go to memory."""

    shared_bytes: int
    spilled_bytes: int


def compiled(
    name: str, dtype: torch.dtype, inner: int, *, causal: bool, mask: int, capability: int, ones: bool
) -> Needs:
    """A kernel for a compute capability, as ``90``; ``ones``: where all of :data:`ONES` are."""
    kernel = getattr(attention_triton, name)
    blocks: dict[str, int] = attention_triton.blocks_of(dtype, inner, inner)
    options = {name: blocks.pop(name) for name in ("num_warps", "num_stages")}
    constants = {**blocks, "CAUSAL": causal, "MASK": mask, "PRECISION": "ieee"}
    if ones:
        constants.update({argument: 1 for argument in kernel.arg_names if argument in ONES})
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            kind = "constexpr"
        elif argument in ("q", "k", "v", "out", "grad", "of_q", "of_k", "of_v"):
            kind = "*" + NUMBERS[dtype]
        elif argument == "mask":
            kind = "*" + MASKS[mask]
        elif argument in ("row", "column"):
            kind = "*i32"
        elif argument in ("log_sum", "product"):
            kind = "*fp32"
        else:
            kind = "fp32" if argument in ("scale", "unscaled") else "i32"
        signature[argument] = kind
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    made = triton.compile(
        ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32), options=options,
    )  # fmt: skip
    return Needs(made.metadata.shared, _spilled(made.asm["ptx"], capability))


def _spilled(ptx: str, capability: int) -> int:
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    kind = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(assembler), "-v", f"--gpu-name={kind}", str(source), "-o", str(source.with_suffix(".cubin"))]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", said))


KERNELS = ("forward_kernel", "backward_to_queries", "backward_to_keys")


def main(dtype: str, *numbers: str) -> None:
    """Tell what all kernels need: ``float16 64 1 0 90 1`` is of 64 elements, causal, without a mask, for an H100."""
    inner, causal, mask, capability, ones = map(int, numbers)
    for name in KERNELS:
        needs = compiled(
            name, getattr(torch, dtype), inner, causal=bool(causal), mask=mask, capability=capability, ones=bool(ones)
        )
        print(name, *needs, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
