"""All that an op needs to launch a fusion kernel, as lines of text beside the image's (`custom_ops/jit/image.py`).

    words    what each of the kernel's 64-bit words is:
             tensor:0  output:1        an address
             buffer:2                  that of a buffer
             barrier                   that of four bytes, zero before the first launch
             tf32                      1 where float32 may be multiplied as TensorFloat-32, else 0
             extent:0:1:2              the product of dimensions 1 to 2 of tensor 0, as it is given
             first:3  ctas:3           the first CTA of piece 3 within its phase, how many it has
    pieces   for each PHASE/MOST/SLABS/FACTOR/FACTOR..., a FACTOR being EACH*SIZE*SIZE..., a SIZE a number or
             T:FIRST:LAST (an extent). It has min(MOST, product over factors of ceil(product of its sizes / EACH)) *
             SLABS CTAs, at least SLABS; a MOST of 0 is none. Pieces of a phase lie side by side; if `single` is 1 all
             begin at 0.
    buffers  for each BYTES*SIZE*SIZE..., a SIZE may be ctas:3, too
    single   whether one CTA runs all pieces, one after the other
    align    bytes of which all addresses of tensors are a multiple
    in_place for each group TENSOR,TENSOR...:OUTPUT,OUTPUT..., each tensor of which may share its memory with each
             output of it; in a launch a tensor shares with one output at most, and an output with one tensor
    spans    for each loop over positions SIZE*SIZE...: unless `wide` is 1 there must be fewer than 2^30 of them
    wide     whether indices have 64 bits

A launch has as many CTAs as the phase with the most. If the image is cooperative and that is more than run at once, the
pieces of a phase get as many fewer, each at least its slabs, and a multiple of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from custom_ops.expr.nodes import Input
from custom_ops.fusion.codegen.kernel import FusionKernel
from custom_ops.fusion.codegen.plan.arguments import ArgumentWord
from custom_ops.fusion.codegen.plan.in_place import in_place
from custom_ops.fusion.codegen.plan.kernel_plan import KernelPlan, Piece, tile_axes
from custom_ops.fusion.codegen.plan.mapping import TILE
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.codegen.plan.shared import SIZES


def describe(kernel: FusionKernel) -> dict[str, int | str]:
    """The lines, by their first words."""
    pattern, plan = kernel.plan.pattern, kernel.plan
    buffers = {(buffer.kind, buffer.number): number for number, buffer in enumerate(kernel.buffers)}

    def word(argument: ArgumentWord) -> str:
        match argument.kind:
            case "parts" | "saved":
                return f"buffer:{buffers[argument.kind, argument.number]}"
            case "size":
                return f"extent:{_size(pattern, argument.number)}"
            case "dimension":
                return f"extent:{_extent(pattern, argument.number, argument.dimension)}"
            case "barrier" | "tf32":
                return argument.kind
        return f"{argument.kind}:{argument.number}"

    def buffer(argument: ArgumentWord) -> str:
        sizes = [_size(pattern, axis) for axis in pattern.program.types[argument.number].axes]
        if argument.kind == "parts":
            number = plan.parts[argument.number]
            slabs = plan.pieces[number].slabs
            sizes.append(str(slabs) if slabs > 1 else f"ctas:{number}")
        return "*".join([str(SIZES[argument.element]), *sizes])

    return {
        "words": " ".join(map(word, kernel.source.arguments)),
        "pieces": " ".join(_piece(plan, piece) for piece in plan.pieces),
        "buffers": " ".join(map(buffer, kernel.buffers)),
        "single": int(plan.single),
        "align": kernel.alignment,
        "in_place": " ".join(_in_place(in_place(plan))),
        "spans": " ".join(_spans(pattern)),
        "wide": int(kernel.wide),
    }


def _in_place(pairs: Iterable[tuple[int, int]]) -> list[str]:
    """The groups: tensors that may share with the same outputs. The pairs of a large net are thousands."""
    outputs: dict[int, list[int]] = {}
    for tensor, output in sorted(pairs):
        outputs.setdefault(tensor, []).append(output)
    tensors: dict[tuple[int, ...], list[int]] = {}
    for tensor, found in outputs.items():
        tensors.setdefault(tuple(found), []).append(tensor)
    return [f"{','.join(map(str, group))}:{','.join(map(str, found))}" for found, group in tensors.items()]


def _spans(pattern: Pattern) -> list[str]:
    """The numbers of elements of roots, and of whole tensors, of which a root may read a part."""
    ranks = [tensor.rank for tensor in pattern.original.tensors]
    tensors = [f"{number}:0:{rank - 1}" for number, rank in enumerate(ranks) if rank]
    roots = ["*".join(_size(pattern, axis) for axis in axes) for axes in pattern.spans]
    return list(dict.fromkeys([*tensors, *roots]))


def _piece(plan: KernelPlan, piece: Piece) -> str:
    pattern = plan.pattern

    def factor(each: int, axes: Iterable[int]) -> str:
        return "*".join([str(each), *(_size(pattern, axis) for axis in axes)])

    if piece.tile is not None:
        batch, rows, columns = tile_axes(plan, piece)
        found = [factor(1, batch), factor(piece.tile.rows, rows), factor(piece.tile.columns, columns)]
        return "/".join([str(piece.phase), str(piece.most), "1", *found])
    factors = [factor(piece.owner.rows * piece.vector, piece.rows)]
    if piece.tiled:
        *others, down, along = piece.rows
        factors = [factor(1, others), factor(TILE, [down]), factor(TILE, [along])]
    return "/".join([str(piece.phase), str(piece.most), str(piece.slabs), *factors])


def _size(pattern: Pattern, axis: int) -> str:
    """The size of an axis: a number, or a product of dimensions."""
    if (known := pattern.sizes[axis]) is not None:
        return str(known)
    for node in pattern.program.nodes:
        if isinstance(node, Input):
            for dimension, index in enumerate(node.index):
                if index.axis == axis:
                    return _extent(pattern, node.tensor, dimension)
    raise AssertionError(f"the size of axis {axis} is unknown")


def _extent(pattern: Pattern, tensor: int, dimension: int) -> str:
    groups = pattern.groups[tensor]
    first = sum(groups[:dimension])
    return f"{tensor}:{first}:{first + groups[dimension] - 1}"
