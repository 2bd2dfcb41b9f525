"""TfmemFusion with corrupt texts: an error of TensorFlow's, or a run within what there is."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.errors import TfmemError
from custom_ops.expr.text import from_text
from custom_ops.fusion.region import Kernel, Region, TensorType, View
from custom_ops.fusion.text import from_text as region_from_text
from custom_ops.fusion.text import to_text
from custom_ops.load import load
from tests.fusion_regions import softmax_step
from tests.tf.fusion_calls import call, product, run_region

INPUTS, SEED = 2000, 7

# Numbers too large to be had, and small ones; nothing that could be had and would fill the machine.
NUMBERS = (
    *("0", "1", "2", "3", "4", "5", "9", "10", "12", "-1", "?", "nan", "1.5", "+1"),
    *("70368744177664", "9223372036854775807", "18446744073709551617"),
)
OPS = (
    *("Relu", "Identity", "AddV2", "Where", "Unique", "ReadVariableOp", "AssignVariableOp", "ResourceGather", "Switch"),
    *("Merge", "NextIteration", "Enter", "NoOp", "Placeholder", "_Arg", "_Retval", "_Recv", "Const", "MatMul", "Shape"),
    *("PartitionedCall", "VariableV2", "Assign", "BatchMatMulV2", "_FusedMatMul", "Reshape", "Conv2D", "Nothing"),
)
WORDS = (
    *("input", "variable", "value", "program", "read", "kernel", "call", "members", "view", "assign", "output", ">"),
    *(
        "v0",
        "v1",
        "v2",
        "-",
        "float32",
        "float16",
        "int32",
        "bool",
        "complex64",
        "axes",
        "tensor",
        "a0",
        "a1",
        "  ",
        "",
    ),
)


def everything() -> Region:
    """Steps of all kinds, over x [3, 4], y [3, 10], w [4, 10] and b [10]."""
    step = softmax_step(product, None, 4)
    wide, rows = TensorType("float32", (None, 10)), TensorType("float32", (None,))
    double = Kernel(from_text("program 1\naxes 0\ntensor float32 1\ninput 0 a0\nadd 0 0\noutput 1 0\n"), (11,), (12,))
    return Region(
        2,
        step.variables,
        (*step.values, wide, rows, rows, wide),
        (*step.steps, call("Relu", (6,), (10,), T=tf.float32), View(10, 11), double, View(12, 13)),
        (5, 12, 13, 6),
    )


def mutated(text: str, source: random.Random) -> str:
    lines = text.splitlines()
    for _ in range(source.randint(1, 3)):
        place, other = source.randrange(len(lines)), source.randrange(len(lines))
        match source.randrange(9):
            case 0:
                lines.insert(other, lines[place])
            case 1:
                del lines[place]
            case 2:
                lines[place], lines[other] = lines[other], lines[place]
            case 3:
                cut = source.randrange(len(lines[place]) + 1)
                lines[place] = lines[place][:cut] + chr(source.randrange(1, 256)) + lines[place][cut + 1 :]
            case _:
                words = lines[place].split(" ")
                word = source.randrange(len(words))
                number = re.fullmatch(r"v?\d+", words[word])
                if number and source.random() < 0.7:
                    words[word] = words[word].rstrip("0123456789") + str(source.randrange(15))
                else:
                    words[word] = source.choice((*NUMBERS, *OPS, *WORDS))
                if source.random() < 0.1:
                    words.insert(word, source.choice((*NUMBERS, *WORDS)))
                lines[place] = " ".join(words)
        if not lines:
            return ""
    return "\n".join(lines) + "\n"


def run(text: str) -> bool:
    """Whether the op takes it and runs."""
    rng = np.random.default_rng(0)
    x, y = rng.random((3, 4), np.float32), np.eye(3, 10, dtype=np.float32)
    w, b = tf.Variable(tf.ones([4, 10])), tf.Variable(tf.ones([10]))
    try:
        found: Any = load().ops.tfmem_fusion(
            args=[x, y], variables=[w.handle, b.handle], T_out=[tf.float32] * 4, region=text
        )
    except (tf.errors.OpError, ValueError):
        return False
    return all(np.asarray(value).size >= 0 for value in (*found, w, b))


@pytest.mark.long
def test_no_text_ends_the_process() -> None:
    text, source = to_text(everything()), random.Random(SEED)
    assert run(text)
    taken = read = 0
    for _ in range(INPUTS):
        tried = mutated(text, source)
        ran = run(tried)
        taken += ran
        try:
            region_from_text(tried)
            read += 1
        except TfmemError:
            # What Python refuses, C++ does, too, but for what only the writer has to keep to.
            assert not ran or "program" in tried
    assert INPUTS // 50 < taken <= read + INPUTS // 20


@pytest.mark.parametrize(
    ("line", "by", "message"),
    [
        ("region 1", "region 2", "expected 'region 1' on the first line, found 'region 2'"),
        (
            "input float32 ? 4",
            "input float32 ? -4",
            "an integer from 0 to .* at line 2 word 4, found '-4' in 'input float32 [?] -4'",
        ),
        ("input float32 ? 4", "input resource ? 4", "expected a dtype at line"),
        ("input float32 ? 4", "input float64 ? 4", "the op has inputs"),
        ("read v0 > 2", "read v2 > 2", "expected an integer from 0 to 1 at line"),
        ("read v0 > 2", "read v0 > 3", "gives value 3 of 14; expected 2"),
        ("read v0 > 2", "read v1 > 2", "the variable is float32\\[10\\], the value float32\\[4,10\\]"),
        ("assign v1 7", "assign v1 9", "expected an integer from 0 to .* found '9' in 'assign v1 9'"),
        ("kernel 0 4 3 1 > 5 6 7", "kernel 3 4 3 1 > 5 6 7", "expected an integer from 0 to . at line .*, found '3'"),
        ("kernel 0 4 3 1 > 5 6 7", "kernel 0 4 4 1 > 5 6 7", "its program has float32 of 1 dimensions there"),
        ("kernel 0 4 3 1 > 5 6 7", "kernel 0 4 3 > 5 6 7", "its program has 3 tensors and 3 outputs"),
        ("kernel 0 4 3 1 > 5 6 7", "kernel 0 4 3 1 > 5 6 8", "numbered in order"),
        ("  exp 4", "  exp 40", "expected an integer from 0 to .* at line .* word 2, found '40' in 'exp 40'"),
        ("  exp 4", "exp 4", "expected a type, a program, a step or outputs at line"),
        ("output 5 12 13 6", "output 5 12 13", "the op has inputs"),
        ("output 5 12 13 6", "output 5 12 13 14", "expected an integer from 0 to 13 at line"),
        ("output 5 12 13 6", "members a", "stands behind a step without members"),
    ],
)
def test_wrong_texts_are_named(line: str, by: str, message: str) -> None:
    text = to_text(everything())
    assert f"\n{line}\n" in "\n" + text
    wrong = ("\n" + text).replace(f"\n{line}\n", f"\n{by}\n")[1:]
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=message):
        load().ops.tfmem_fusion(args=[np.ones((3, 4), np.float32)] * 2, variables=[], T_out=[], region=wrong)


DRAWS = """region 1
input uint64 ?
input uint64 2
value float32 4
program
  program 1
  axes 4
  tensor uint64 1
  tensor uint64 1
  random float32 0 1 a0
  output 0 0
kernel 0 0 1 > 2
output 2
"""


@pytest.mark.parametrize(
    ("line", "by", "message"),
    [
        ("", "", ""),
        ("input uint64 ?", "input int64 ?", "value 0 is int64.*; its program has uint64 of 1 dimensions there"),
        ("  tensor uint64 1\n  random", "  tensor int64 1\n  random", "tensor 1 is no state of a random generator"),
        ("random float32 0 1 a0", "random bool 0 1 a0", "expected a dtype at line"),
        ("random float32 0 1 a0", "random float32 0 2 a0", "expected an integer from 0 to 1 at line"),
        ("random float32 0 1 a0", "random float32 0 1 n0", "expected an integer .* found 'n0'"),
        ("random float32 0 1 a0", "random float32 0 1 a1", "expected an integer from 0 to 0 at line .* found '1'"),
        ("random float32 0 1 a0", "random float32 0 1 a0/0", "expected an integer from 1 to"),
        ("random float32 0 1 a0", "random float32 0 1", "expected an index at line .* found the end of the line"),
        ("random float32 0 1 a0", "random float32 0 1 -1+a0", "random numbers -1 to 2 are drawn; expected 0 to"),
        ("random float32 0 1 a0", "random float32 0 1 1099511627776*a0", ""),
        ("random float32 0 1 a0", "input 0 a0", "reads the state of a random generator"),
        ("input uint64 2", "input uint64 3", "a key of 1 numbers and a counter of 3; expected 1 and 2"),
    ],
)
def test_draws_that_nobody_wrote(line: str, by: str, message: str) -> None:
    counter = np.arange(3 if by == "input uint64 3" else 2, dtype=np.uint64)
    key = np.ones(1, np.int64 if by == "input int64 ?" else np.uint64)

    def found() -> Any:
        return load().ops.tfmem_fusion(args=[key, counter], variables=[], T_out=[tf.float32], region=text)

    text = DRAWS.replace(line, by) if line else DRAWS
    if message:
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=message):
            found()
    else:
        assert np.all(np.asarray(found()) < 1)


def test_a_key_that_is_not_there() -> None:
    given = [np.zeros(0, np.uint64), np.zeros(2, np.uint64)]
    with pytest.raises(tf.errors.InvalidArgumentError, match="a key of 0 numbers and a counter of 2"):
        load().ops.tfmem_fusion(args=given, variables=[], T_out=[tf.float32], region=DRAWS)


FOUR = TensorType("float32", (4,))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (call("NoSuchOp", (0,), (1,)), "NoSuchOp"),
        (call("Relu", (0,), (1,), T=tf.float64), "takes .*double.* the region has .*float"),
        (call("Relu", (0, 0), (1,), T=tf.float32), "Relu"),
        (call("MatMul", (0, 0), (1,), T=tf.float32), "ndims must be [=>]= 2"),
        (call("_Recv", (), (1,), tensor_type=tf.float32), "_Recv|asynchronous"),
        (call("Placeholder", (), (1,), dtype=tf.float32), "feed a value|Placeholder"),
        (call("_Arg", (), (1,), T=tf.float32, index=0), "_Arg|call frame"),
        (call("Switch", (0, 0), (1,), T=tf.float32), "Switch"),
        (call("Cast", (0,), (1,), SrcT=tf.float32), "DstT|Cast"),
    ],
    ids=lambda made: getattr(made, "op", None),
)
def test_calls_that_cannot_be_made(made: Any, message: str) -> None:
    region = Region(1, (), (FOUR, FOUR), (made,), (1,))
    with pytest.raises(tf.errors.OpError, match=message):
        run_region(region, [np.ones(4, np.float32)])


def test_a_call_whose_shape_nobody_knows() -> None:
    whole = TensorType("int64", (None, 1))
    region = Region(1, (), (FOUR, whole), (call("Where", (0,), (1,), T=tf.float32),), (1,))
    with pytest.raises(tf.errors.UnimplementedError, match="a call of Where gives shape"):
        run_region(region, [np.ones(4, np.float32)])


def test_a_call_that_gives_another_shape_than_is_declared() -> None:
    region = Region(1, (), (FOUR, TensorType("float32", (5,))), (call("Relu", (0,), (1,), T=tf.float32),), (1,))
    with pytest.raises(tf.errors.InternalError, match=r"output 0 has shape \[4\]; expected \[5\]"):
        run_region(region, [np.ones(4, np.float32)])


def test_sizes_that_no_memory_has() -> None:
    huge = 1 << 45
    text = f"program 1\naxes {huge}\ntensor float32 0\ninput 0\noutput 0 0\n"
    region = Region(
        1, (), (TensorType("float32", ()), TensorType("float32", (None,))), (Kernel(from_text(text), (0,), (1,)),), (1,)
    )
    with pytest.raises((tf.errors.ResourceExhaustedError, tf.errors.InvalidArgumentError)):
        run_region(region, [np.float32(1)])


def test_values_of_more_bytes_than_64_bits_count() -> None:
    """Two products of 2^62 bytes, which a third one reads: 64 bits count the bytes of each, and not of both."""
    n = 1 << 30
    column, row = (
        from_text(f"program 1\naxes {rows} {columns}\ntensor float32 0\ninput 0\noutput 0 0 1\n")
        for rows, columns in ((n, 1), (1, n))
    )
    one, many = TensorType("float32", ()), TensorType("float32", (None, None))
    steps = (
        *(Kernel(column, (0,), (1,)), Kernel(row, (0,), (2,))),
        *(product((1, 2), 3, False), product((1, 2), 4, False), product((3, 4), 5, False)),
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="its values have more bytes than 64 bits count"):
        run_region(Region(1, (), (one, *[many] * 5), steps, (5,)), [np.float32(1)])
