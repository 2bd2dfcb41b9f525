"""All kinds of nodes of a net, as the op reads them.

The text, a line each, words separated by a space:

    dynamic 1
    parameter SPARSE SIZE...            of one dimension or two; 1: only looked up, so that its gradient is of few rows
    type WIDTH...                       of each tuple of vectors that is a state
    kind TYPE                           of each kind of node, followed by
    children TYPE...
    arguments BOUND...
    outputs WIDTH...
    kept WIDTH...
    scratch WIDTH...
    constants VALUE...
    section STEPS                       seven times, each followed by so many lines
    OP TARGET VALUE... | NUMBER...      a place is k0, s0 or c0; "-" is no target

Ops and numbers are those of `custom_ops.dynamic.node_code`, sections those of `custom_ops.dynamic.sections`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from custom_ops.dynamic.differentiate import differentiate
from custom_ops.dynamic.node_code import Instruction, Kind, Parameter
from custom_ops.dynamic.row_reads import RowReads, row_reads
from custom_ops.dynamic.sections import Sections, sections
from custom_ops.errors import DynamicError
from custom_ops.text_lines import joined, line

FORMAT = "dynamic 1"
MOST_PARTS = 1 << 16  # values of a section, as the op reads them


@dataclass(frozen=True)
class Spec:
    """Parameters, and the kinds of nodes that read them.

    Attributes:
        parameters: all, those that no kind reads as well.
        kinds: their forward passes.
        differentiable: whether the op gets backward passes as well. Without them it keeps no values for them.
        stepped: whether these give the gradients of trained parameters alone, as a step needs them.
    """

    parameters: tuple[Parameter, ...]
    kinds: tuple[Kind, ...]
    differentiable: bool = True
    stepped: bool = False

    def __post_init__(self) -> None:
        for parameter in self.parameters:
            if len(parameter.shape) not in {1, 2} or min(parameter.shape) < 1:
                raise DynamicError(
                    f"parameter '{parameter.name}' has shape {list(parameter.shape)}; expected one dimension or two"
                )

    @cached_property
    def types(self) -> tuple[tuple[int, ...], ...]:
        """The types of states: each combination of widths once."""
        found = [widths for kind in self.kinds for widths in (kind.state, *kind.children)]
        return tuple(dict.fromkeys(found))

    @cached_property
    def sparse(self) -> tuple[bool, ...]:
        """Flags, for each parameter, whether it is a table that is only looked up."""
        uses: list[set[str]] = [set() for _ in self.parameters]
        for kind in self.kinds:
            for instruction in kind.code:
                if instruction.op in {"lookup", "product", "row"}:
                    uses[instruction.numbers[0]].add(instruction.op)
        return tuple(found == {"lookup"} for found in uses)

    @cached_property
    def row_reads(self) -> tuple[RowReads, ...]:
        """For each parameter, which arguments of nodes read rows of it."""
        return tuple(row_reads(self.kinds, number) for number in range(len(self.parameters)))

    @cached_property
    def forward_only(self) -> Spec:
        """This specification without backward passes."""
        return replace(self, differentiable=False)

    @cached_property
    def of_step(self) -> Spec:
        """This specification for an op that updates trained parameters and does not change the others."""
        return self if all(parameter.trained for parameter in self.parameters) else replace(self, stepped=True)

    def code(self, kind: Kind) -> tuple[Instruction, ...]:
        """The code of a kind, with its backward pass if the op needs one."""
        if not self.differentiable:
            return kind.code
        whole = tuple(replace(parameter, trained=True) for parameter in self.parameters)
        return differentiate(self.parameters if self.stepped else whole, kind)

    @cached_property
    def text(self) -> str:
        """The text that the op reads."""
        lines = [line("parameter", int(s), *p.shape) for p, s in zip(self.parameters, self.sparse, strict=True)]
        lines += [line("type", *widths) for widths in self.types]
        for kind in self.kinds:
            lines += _kind(kind, self.types, sections(kind, self.code(kind), together=True))
        return joined(FORMAT, lines)


def _kind(kind: Kind, types: tuple[tuple[int, ...], ...], how: Sections) -> Iterable[str]:
    yield line("kind", types.index(kind.state))
    yield line("children", *(types.index(widths) for widths in kind.children))
    yield line("arguments", *kind.arguments)
    yield line("outputs", *kind.outputs)
    most = max(map(len, (how.kept, how.scratch, how.constants, *how.steps)))
    if most > MOST_PARTS:
        raise DynamicError(
            f"kind '{kind.name}' computes {most} values in one section; expected at most {MOST_PARTS}: make it several "
            "nodes"
        )
    yield line("kept", *how.kept)
    yield line("scratch", *how.scratch)
    yield line("constants", *map(repr, how.constants))
    for steps in how.steps:
        yield line("section", len(steps))
        for step in steps:
            yield line(step.op, step.target or "-", *step.values, "|", *step.numbers)
