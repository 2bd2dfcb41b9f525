"""Regions as text, which the op's attribute holds.

The step of a logistic regression that `region.py` shows, shortened:

    region 1
    input float32 100 784           value 0; "?" is a size that is known when the region runs
    input float32 100 10
    variable float32 784 10         variable 0
    value float32 784 10            value 2: values go on after the inputs
    value float32 100 10
    ...
    program                         program 0; the lines of a program begin with two spaces
      program 1
      axes 0 10
      ...
    read v0 > 2
    call MatMul Eg8... 0 2 > 3      op, attributes (web-safe base64, "-" for none), its variables (v0), its inputs
    kernel 0 3 1 > 4                program, inputs, outputs
    members softmax sub mul         names, of the kernel or the call before
    view 4 > 5
    assign v0 6
    output 4

One line each, words separated by a space, no comments. Lines stand in this order, but that a program may stand
anywhere before the first kernel that computes it; kernels with equal programs share one.
"""

from __future__ import annotations

import base64
from dataclasses import replace

from custom_ops.errors import RegionError
from custom_ops.expr import text as program_text
from custom_ops.expr.program import Program
from custom_ops.fusion.region import Assign, Call, Kernel, Read, Region, Step, TensorType, View
from custom_ops.fusion.region_check import check
from custom_ops.text_lines import joined, line, read_lines

FORMAT = "region 1"
_INDENT = "  "


def to_text(region: Region) -> str:
    """The region, ending in a line break.

    Raises:
        RegionError: it is none that a reader could run.
    """
    check(region)
    lines = [_type_line("input", found) for found in region.values[: region.inputs]]
    lines += [_type_line("variable", found) for found in region.variables]
    lines += [_type_line("value", found) for found in region.values[region.inputs :]]
    programs: dict[Program, int] = {}
    for step in region.steps:
        if isinstance(step, Kernel) and step.program not in programs:
            programs[step.program] = len(programs)
            lines += ["program", *(_INDENT + each for each in program_text.to_text(step.program).splitlines())]
        lines += _step_lines(step, programs)
    lines.append(line("output", *region.outputs))
    return joined(FORMAT, lines)


def from_text(text: str) -> Region:
    """Reads what `to_text` wrote.

    Raises:
        RegionError: the text is no region of this format, or none that a reader could run; the message names the line
            or the step.
    """
    reader = _Reader()
    read_lines(text, FORMAT, "a region", RegionError, reader.read)
    region = reader.region()
    check(region)
    return region


class _Reader:
    def __init__(self) -> None:
        self.inputs = 0
        self.variables: list[TensorType] = []
        self.values: list[TensorType] = []
        self.programs: list[list[str]] = []
        self.steps: list[Step] = []
        self.outputs: list[tuple[int, ...]] = []

    def read(self, text: str) -> None:
        if text.startswith(_INDENT):
            self.programs[-1].append(text.removeprefix(_INDENT))
            return
        word, *rest = text.split(" ")
        if word in ("input", "variable", "value"):
            if word == "input" and len(self.values) > self.inputs:
                raise ValueError("an input stands after a value")
            self.inputs += word == "input"
            (self.variables if word == "variable" else self.values).append(_type(rest))
        elif word == "program":
            self.programs.append([])
        elif word == "members":
            step = self.steps[-1]
            if not isinstance(step, Kernel | Call):
                raise ValueError("there is neither a kernel nor a call before it")
            self.steps[-1] = replace(step, members=tuple(rest))
        elif word == "output":
            self.outputs.append(tuple(map(int, rest)))
        else:
            self.steps.append(self.step(word, rest))

    def step(self, word: str, rest: list[str]) -> Step:
        if word == "assign":
            variable, value = rest
            return Assign(_variable(variable), int(value))
        if ">" not in rest:
            raise ValueError("expected the values that a step gives after '>'")
        arrow = rest.index(">")
        before, after = rest[:arrow], tuple(map(int, rest[arrow + 1 :]))
        if word == "kernel":
            number = int(before[0])
            if not 0 <= number < len(self.programs):
                raise ValueError(f"there are {len(self.programs)} programs before it")
            program = program_text.from_text("\n".join(self.programs[number]))
            return Kernel(program, tuple(map(int, before[1:])), after)
        if word == "call":
            op, attrs, *operands = before
            variables = [word for word in operands if word.startswith("v")]
            values = operands[len(variables) :]
            code = b"" if attrs == "-" else base64.b64decode(attrs, b"-_", validate=True)
            return Call(op, code, tuple(map(int, values)), after, tuple(map(_variable, variables)))
        (one,), (output,) = before, after
        if word == "view":
            return View(int(one), output)
        if word == "read":
            return Read(_variable(one), output)
        raise ValueError("there is no such line")

    def region(self) -> Region:
        if len(self.outputs) != 1:
            raise RegionError(f"expected one line 'output VALUE...', found {len(self.outputs)}")
        return Region(self.inputs, tuple(self.variables), tuple(self.values), tuple(self.steps), self.outputs[0])


def _step_lines(step: Step, programs: dict[Program, int]) -> list[str]:
    match step:
        case Kernel(program=program, inputs=inputs, outputs=outputs, members=members):
            lines = [line("kernel", programs[program], *inputs, ">", *outputs)]
        case Call(op=op, attrs=attrs, inputs=inputs, outputs=outputs, variables=variables, members=members):
            code = base64.urlsafe_b64encode(attrs).decode() or "-"
            lines = [line("call", op, code, *(f"v{variable}" for variable in variables), *inputs, ">", *outputs)]
        case View(input=value, output=output):
            return [line("view", value, ">", output)]
        case Read(variable=variable, output=output):
            return [line("read", f"v{variable}", ">", output)]
        case Assign(variable=variable, value=value):
            return [line("assign", f"v{variable}", value)]
    return [*lines, line("members", *members)] if members else lines


def _type_line(word: str, found: TensorType) -> str:
    return line(word, found.dtype, *("?" if size is None else size for size in found.shape))


def _type(words: list[str]) -> TensorType:
    dtype, *sizes = words
    return TensorType(dtype, tuple(None if size == "?" else int(size) for size in sizes))


def _variable(word: str) -> int:
    if not word.startswith("v"):
        raise ValueError(f"expected a variable such as v0, found '{word}'")
    return int(word[1:])
