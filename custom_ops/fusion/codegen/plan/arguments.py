"""What a fusion kernel is given: 64-bit words, each an address, a size or a range of CTAs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from custom_ops.expr.cuda import C_TYPES, HALF_TYPES
from custom_ops.expr.nodes import Reduce
from custom_ops.expr.program import STATE
from custom_ops.fusion.codegen.plan.kernel_plan import KernelPlan

Kind: TypeAlias = Literal["tensor", "output", "parts", "saved", "barrier", "tf32", "size", "dimension", "first", "ctas"]

_INTEGERS = ("size", "dimension", "first", "ctas", "tf32")


@dataclass(frozen=True)
class ArgumentWord:
    """One word.

    Attributes:
        kind: the address of a tensor, an output, CTAs' parts of a reduction, a reduction's results or the barrier; the
            size of an axis or of a tensor's dimension; the first CTA of a piece, or how many there are; whether
            products may be of TF32.
        number: of the tensor, output, reduction's node, axis or piece.
        dimension: of the tensor.
        element: C++ type of what lies at an address.
    """

    kind: Kind
    number: int = 0
    dimension: int = 0
    element: str = ""

    @property
    def name(self) -> str:
        """The argument's name in the source."""
        if self.kind == "tf32":
            return self.kind
        short = {"size": "n", "dimension": "d"}.get(self.kind, f"{self.kind}_")
        return f"{short}{self.number}" + (f"_{self.dimension}" if self.kind == "dimension" else "")

    def declaration(self, word: int) -> str:
        """The declaration of the word's value in C++."""
        if self.kind in _INTEGERS:
            kind = "int" if self.kind in ("first", "ctas", "tf32") else "Index"
            return f"const {kind} {self.name} = static_cast<{kind}>(p[{word}]);"
        return f"{self.element}* const {self.name} = pointer<{self.element}>(p[{word}]);"


def storage(dtype: str) -> str:
    """The type of a tensor's elements."""
    return "Word" if dtype == STATE else HALF_TYPES.get(dtype, C_TYPES[dtype])


def buffers(plan: KernelPlan) -> tuple[ArgumentWord, ...]:
    """Device memory that a kernel needs beside its tensors: CTAs' parts of reductions, and results for later phases."""
    types = [type_.dtype for type_ in plan.pattern.program.types]
    saved = sorted({place for piece in plan.pieces for place in piece.saved})
    parts = [ArgumentWord("parts", place, element=C_TYPES[types[place]]) for place in sorted(plan.parts)]
    return (*parts, *(ArgumentWord("saved", place, element=C_TYPES[types[place]]) for place in saved))


def arguments(plan: KernelPlan) -> tuple[ArgumentWord, ...]:
    """All that a piece can be given, in order."""
    pattern, program = plan.pattern, plan.pattern.program
    types = [type_.dtype for type_ in program.types]
    words = [ArgumentWord("tensor", i, element=f"const {storage(t.dtype)}") for i, t in enumerate(program.tensors)]
    words += [ArgumentWord("output", i, element=storage(types[o.node])) for i, o in enumerate(program.outputs)]
    words += buffers(plan)
    words.append(ArgumentWord("tf32"))
    words += [ArgumentWord("size", axis) for axis, size in enumerate(pattern.sizes) if size is None]
    words += [
        ArgumentWord("dimension", tensor, dimension)
        for tensor, sizes in enumerate(pattern.dimensions)
        for dimension, size in enumerate(sizes)
        if isinstance(size, str) and size.startswith("d")
    ]
    return (*words, *(ArgumentWord("ctas", number) for number in range(len(plan.pieces))))


def accumulator(plan: KernelPlan, place: int) -> str:
    """The type in which a reduction is accumulated: float for half types."""
    assert isinstance(plan.pattern.program.nodes[place], Reduce)
    return C_TYPES[plan.pattern.program.types[place].dtype]
