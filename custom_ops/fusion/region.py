"""What one `TfmemFusion` op runs, as data: a sequence of steps over numbered values.

Values are numbered: first the op's inputs, then the outputs of the steps, in order. The step of a logistic regression
without its loss, `w -= 0.1 * x^T (softmax(x w) - y) / 100`, is

    input 0 (x [100, 784])  input 1 (y [100, 10])
    Read    variable 0 (w)            -> 2    [784, 10]
    Call    MatMul(0, 2)              -> 3    [100, 10]
    Kernel  softmax, minus y, times   -> 4    [100, 10]     one program, four ops of the graph
    Call    MatMul(0, 4), transposed  -> 5    [784, 10]
    Kernel  2 - 0.1 * 5               -> 6    [784, 10]
    Assign  variable 0 <- 6

Two levels: a region is what one op runs, as large as possible, since dispatching ops takes the most time; a kernel is
one pattern of FusionStitching (arXiv 1911.11576, section 4), memory-intensive ops that one piece of code computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from custom_ops.expr.program import Program

Shape: TypeAlias = tuple[int | None, ...]  # None: known when the region runs


@dataclass(frozen=True)
class TensorType:
    """The type of a value; a size is None if it is known only when the region runs."""

    dtype: str
    shape: Shape


@dataclass(frozen=True)
class Kernel:
    """Computes a program.

    Attributes:
        program: its tensors are `inputs`, its outputs `outputs`.
        inputs: values, one for each tensor of the program.
        outputs: new values, one for each output of the program.
        members: names of the graph's nodes that it stands for.
    """

    program: Program
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """Runs TensorFlow's own kernel of an op; on a GPU a product by cuBLASLt, or a convolution by cuDNN.

    Attributes:
        op: TensorFlow's name of it.
        attrs: its attributes, a serialised NodeDef without name and inputs; a tensor "constant_0" is its input 0.
        inputs: values, in the op's order, without its variables and what is a constant.
        outputs: new values.
        variables: those that the op takes as resources, which come first among its inputs.
        members: names of the graph's nodes that it stands for.
    """

    op: str
    attrs: bytes
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    variables: tuple[int, ...] = ()
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class View:
    """The numbers of `input` in the shape of `output`, which has at most one unknown size; shares memory."""

    input: int
    output: int


@dataclass(frozen=True)
class Read:
    """The number that a variable has now."""

    variable: int
    output: int


@dataclass(frozen=True)
class Assign:
    """Gives a variable a value; a later `Read` sees it, an earlier one does not."""

    variable: int
    value: int


Step: TypeAlias = Kernel | Call | View | Read | Assign


@dataclass(frozen=True)
class Region:
    """See the module's docstring.

    Attributes:
        inputs: how many of the values are inputs.
        variables: the type of each variable, in the order in which the op takes their resources.
        values: the type of each value.
        steps: in the order in which they run.
        outputs: values that the op gives, in its order.
    """

    inputs: int
    variables: tuple[TensorType, ...]
    values: tuple[TensorType, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
