"""Mutates valid cells, GPU programs, programs over tensors and dynamic nets, and runs what reads them under sanitizers.

    python -m tests.tf.fuzz_parsers --inputs 1000000 --seed 1

A run that ends badly prints the input; the same seed gives the same inputs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from custom_ops.jit.image import KernelImage
from custom_ops.recurrent.differentiate import differentiate
from custom_ops.recurrent.gpu_program import RecurrentProgram
from tests import dynamic_specs, programs, recurrent_cells
from tests.tf import native_programs

PARTS = (
    "recurrent/cell",
    "cpu/cpu_kernels",
    "cpu/cpu_kernels_avx2",
    "cpu/cpu_kernels_avx512",
    "cuda/kernel_image",
    "text_reader",
    "recurrent/recurrent_cut",
    "recurrent/recurrent_program",
    "recurrent/recurrent_run",
    "recurrent/recurrent_tile",
    "dynamic/batch",
    "dynamic/gradients",
    "dynamic/layout",
    "dynamic/products",
    "dynamic/run",
    "dynamic/script",
    "dynamic/script_check",
    "dynamic/spec",
    "sha256",
    "recurrent/step_program",
    "cpu/expression",
    "cpu/expression_tiles",
    "cpu/phases",
    "cpu/placement",
    "cpu/sized_expression",
    "cpu/tensor_port",
    "cpu/tile_compiler",
    "cpu/tile_domains",
    "cpu/tile_locations",
    "cpu/tile_plan",
    "cpu/tile_program",
    "cpu/tile_run",
    "cpu/tile_worker",
)
DRAWS = """program 1
axes 0 5
tensor float32 2
tensor uint64 0
tensor uint64 1
input 0 a0 a1
random float32 1 2 5*a0+a1
random int64 1 2 3+2*a1/2%2
add 0 1
reduce max 2 1
output 3 1 0
output 4
"""
# Dtypes, accesses and reductions that the steps of regressions do not have.
MIXED = """program 1
axes 0 3 0
tensor float16 2
tensor int64 3
tensor bool 1
input 0 2*a0+1 -1*a2+4
input 1 a0 a1/2%2 0
input 2 a2
position int32 2
cast float16 1
multiply 0 4
reduce max 5 2
select 2 5 6
cast int64 3
maximum 8 1
reduce product 9 0 1
reduce any 2 2
logical_not 11
cast float64 7
reduce sum 13 0 1 2
greater 13 14
reduce all 15 0 1
output 7 2 0 1
output 10 2
output 12
output 14 0
output 16 2
"""

# As tools/sanitized_g++, which says why.
SANITIZERS = (
    "-O1",
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize=vptr,null,nonnull-attribute,returns-nonnull-attribute",
    "-fno-sanitize-recover=all",
    "-U__SANITIZE_ADDRESS__",
)


def corpus() -> Iterator[tuple[str, bytes]]:
    """Valid texts of each kind: the library's cells and their gradients' cells, headers of GPU programs, programs
    over tensors, and dynamic nets."""
    for spec in (*map(dynamic_specs.tree_rnn, (5, 19, 130)), dynamic_specs.of_all_ops(3)):
        yield "dynamic", spec.text.encode()
        yield "dynamic", spec.forward_only.text.encode()
    for text in (programs.SOFTMAX_STEP, programs.SIGMOID_STEP, MIXED, programs.GATHERS, DRAWS):
        yield "expression", text.encode()
    for cell in recurrent_cells.library(5).values():
        yield "cell", cell.to_text().encode()
        gradient = differentiate(cell)
        yield "cell", gradient.forward.to_text().encode()
        yield "cell", gradient.backward.to_text().encode()
    for fallback, cluster, stages in (("", 1, 0), ("plain", 8, 0), ("", 1, 3)):
        shape = {"threads": 256, "shared": 1 << 16, "cluster": cluster, "cooperative": cluster == 1}
        image = KernelImage(90, "main", code=b"code", **shape)  # type: ignore[arg-type]
        text = RecurrentProgram(image, fallback, rows=4, ctas=32, scratch=64, stages=stages, max_batch=8).to_text()
        yield "program", text.encode()


def fuzz(inputs: int, seed: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """Builds the program and runs it on inputs that it finds in `folder`."""
    binary = native_programs.build_with_parts("fuzz_parsers", PARTS, SANITIZERS)
    texts = folder / "corpus"
    texts.write_bytes(b"".join(b"%s %d\n%s" % (kind.encode(), len(text), text) for kind, text in corpus()))
    environment = native_programs.environment() | {"ASAN_OPTIONS": "detect_leaks=0"}
    environment.pop("LD_PRELOAD", None)
    command = [str(binary), str(texts), str(inputs), str(seed)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=3600)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = fuzz(options.inputs, options.seed, Path(folder))
    print(result.stdout, result.stderr[-10_000:], sep="")
    print(f"seed {options.seed}: {'nothing found' if result.returncode == 0 else 'failed'}")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
