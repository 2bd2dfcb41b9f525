"""Patterns of training steps by templates of every kind, on the CPU: the same numbers for any number of rows."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from custom_ops.errors import KernelError
from custom_ops.fusion.codegen.description import describe
from custom_ops.fusion.codegen.kernel import fit
from custom_ops.fusion.codegen.plan.in_place import in_place
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.jit import nvrtc
from custom_ops.jit.device import DeviceContext
from custom_ops.jit.launch import Module
from tests.compiled import cubin
from tests.cuda_on_cpu.driver import Compiler, CpuDevice, Driver
from tests.fusion_kernels import Case, check, compare, run, varied
from tests.fusion_programs import programs

pytest_plugins = ("tests.fusion_device",)

NAMES = list(programs(1, 1))
ANY_ROWS = [name for name in NAMES if name not in ("adam", "transposes")]


def cases(name: str, most: int, dynamic: bool = False, columns: int = 20) -> list[Case]:
    """A pattern's kernels, for tensors whose columns are known, and whose rows are not if `dynamic`."""
    program, tensors = programs(37, columns)[name]
    more = [programs(rows, columns)[name][1] for rows in (1, 50)] if dynamic else []
    others = [[tensor.shape for tensor in given] for given in more]
    shapes = [
        tuple(size if all(other[i][j] == size for other in others) else None for j, size in enumerate(tensor.shape))
        for i, tensor in enumerate(tensors)
    ]
    kernels = varied(Pattern.of(program, shapes), [tensor.shape for tensor in tensors], most)
    found = [(kernel.plan.configuration.template, kernel.plan.configuration.vector) for kernel in kernels]
    return [Case(program, tensors, template, 64, v, shapes=shapes, more=more) for template, v in found]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_patterns(device: DeviceContext, name: str) -> None:
    given = cases(name, 5, dynamic=name in ANY_ROWS)
    assert given
    compare(device, given)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("columns", [256, 320, 512])
def test_a_row_is_loaded_while_the_one_before_is_computed(device: DeviceContext, columns: int) -> None:
    """Where all threads have as many elements of each row: by lanes and by CTAs, from the first row on and from the
    last, of which some groups have none."""
    found = [
        case
        for name in ("softmax", "cross entropy", "logistic", "layer norm gradient", "batch norm", "dropout")
        for case in cases(name, 24, dynamic=True, columns=columns)
        if "load_row" in case.kernel().source.text
    ]
    whole = "reduce_1[GRID_3,CTA];reduce_4[GRID_3,CTA];output_0[GRID_3-CTA_32-WARP_2];output_1[GRID_3-CTA_32-WARP_2];"
    found.append(Case(*programs(37, columns)["batch norm"], f"{whole}output_2[GRID_3,CTA];", 64, 4))
    texts = [case.kernel().source.text for case in found]
    for some in ("Index(cta) *", "first -= ", "row += ctas", "load_row(row - ctas)"):
        assert any(some in text for text in texts), some
    compare(device, found)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_in_which_threads_run_does_not_matter(compiler: Compiler, seed: int) -> None:
    """Across warps, CTAs and the barrier of the grid."""
    with CpuDevice(driver=Driver(seed), compile_source=compiler) as device:
        compare(device, [case for name in ("cross entropy", "pooling") for case in cases(name, 4)])


@pytest.mark.parametrize("resident", [2, 5])
def test_fewer_ctas_compute_the_same(device: DeviceContext, resident: int) -> None:
    """A cooperative launch is made to fit the device."""
    given = cases("cross entropy", 8)
    cooperative = [case for case in given if case.kernel().plan.cooperative]
    assert cooperative
    compare(device, [Case(case.program, case.tensors, case.template, resident=4 + resident) for case in cooperative])


def test_64_bit_indices(device: DeviceContext) -> None:
    program, tensors = programs(37, 20)["layer norm gradient"]
    given = cases("layer norm gradient", 2)
    compare(device, [Case(program, tensors, case.template, wide=True) for case in given])


def test_empty_tensors(device: DeviceContext) -> None:
    """Sums of nothing are zero, means are not a number, and nothing else is written."""
    found = []
    for name in ("softmax", "logistic", "layer norm gradient", "gelu"):
        program, tensors = programs(37, 20)[name]
        empty = [tensor[:0] if tensor.ndim and tensor.shape[0] == 37 else tensor for tensor in tensors]
        shapes = [
            tuple(size if size == other else None for size, other in zip(a.shape, b.shape, strict=True))
            for a, b in zip(tensors, empty, strict=True)
        ]
        for kernel in varied(Pattern.of(program, shapes), [tensor.shape for tensor in tensors], 3):
            configuration = kernel.plan.configuration
            found.append(
                Case(program, empty, configuration.template, 64, configuration.vector, shapes=shapes, more=[tensors])
            )
    compare(device, found)


def test_nvrtc_takes_the_same_sources() -> None:
    """All in one go."""
    try:
        nvrtc.compiler_version()
    except KernelError as error:
        pytest.skip(str(error))
    kernels = [case.kernel(f"{name.replace(' ', '_')}_{i}") for name in NAMES for i, case in enumerate(cases(name, 1))]
    assert cubin("\n".join(kernel.source.text for kernel in kernels), 90, contract=False)


def test_a_kernel_that_was_made_for_other_shapes_says_so() -> None:
    program, tensors = programs(37, 20)["softmax"]
    kernel = cases("softmax", 1)[0].kernel()
    with pytest.raises(KernelError, match=r"tensor 0 has shape \(37, 21\); the kernel was made for \(37, 20\)"):
        kernel.launch([(37, 21)])
    assert kernel.launch([tensor.shape for tensor in tensors]).ctas > 0
    assert np.prod(program.axes) == 0


@pytest.mark.parametrize("name", ["softmax", "layer norm", "batch norm", "gelu", "adam"])
def test_outputs_lie_where_tensors_lie(device: DeviceContext, name: str) -> None:
    """As many as can, for every kernel that lets them."""
    given, shared = cases(name, 5), 0
    kernels = [case.kernel(f"fusion_{number}") for number, case in enumerate(given)]
    code = device.compile_source("\n".join(kernel.source.text for kernel in kernels), device.arch, contract=False)
    module = Module(code, device.driver)
    for case, kernel in zip(given, kernels, strict=True):
        pairs: dict[int, int] = {}
        for tensor, output in sorted(in_place(kernel.plan)):
            if output not in pairs and tensor not in pairs.values():
                pairs[output] = tensor
        shared += len(pairs)
        check(case, case.tensors, run(device, kernel, case.tensors, module, code, in_place=pairs))
    assert shared


def test_the_description_says_how_to_launch() -> None:
    """Its lines, read as they are documented, give what `launch` gives."""
    for name in NAMES:
        for case in cases(name, 6, dynamic=name in ANY_ROWS):
            kernel = case.kernel()
            for tensors in (case.tensors, *case.more):
                shapes = [tensor.shape for tensor in tensors]
                for resident in (0, 40):
                    expected = kernel.launch(shapes, resident if kernel.plan.cooperative else 0)
                    found = launch_of(describe(kernel), shapes, resident if kernel.plan.cooperative else 0)
                    assert found[:2] == (expected.of_pieces, expected.scratch)
                    words = kernel.words(shapes, expected, lambda kind, number: 1000)
                    assert [word for word in found[2] if word is not None] == [word for word in words if word != 1000]


def launch_of(
    lines: dict[str, int | str], shapes: list[tuple[int, ...]], resident: int
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...], list[int | None]]:
    """The pieces' CTAs, the buffers' bytes, and the words that are no addresses."""

    def extent(text: str) -> int:
        tensor, first, last = map(int, text.split(":"))
        return prod(shapes[tensor][first : last + 1])

    def size(text: str) -> int:
        if text.startswith("ctas:"):
            return counts[int(text[5:])]
        return extent(text) if ":" in text else int(text)

    phases, slabs, counts = [], [], list[int]()
    for piece in str(lines["pieces"]).split():
        phase, most, share, *factors = piece.split("/")
        blocks = 1
        for factor in factors:
            each, *sizes = factor.split("*")
            blocks *= -(-prod(map(size, sizes)) // int(each))
        counts.append(max(1, min(blocks, int(most) or blocks)) * int(share))
        phases.append(int(phase))
        slabs.append(int(share))
    for phase in set(phases):
        here = [i for i, other in enumerate(phases) if other == phase]
        if resident:
            for i, count in zip(here, fit([counts[i] for i in here], [slabs[i] for i in here], resident), strict=True):
                counts[i] = count
    first: list[int] = []
    for i, phase in enumerate(phases):
        beside = i and phases[i - 1] == phase and not lines["single"]
        first.append(first[-1] + counts[i - 1] if beside else 0)
    words: list[int | None] = []
    for word in str(lines["words"]).split():
        kind, _, rest = word.partition(":")
        by_piece = {"first": first, "ctas": counts}
        words.append(extent(rest) if kind == "extent" else by_piece[kind][int(rest)] if kind in by_piece else None)
    buffers = tuple(prod(map(size, buffer.split("*"))) for buffer in str(lines["buffers"]).split())
    return tuple(zip(first, counts, strict=True)), buffers, words
