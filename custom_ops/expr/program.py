"""Programs over tensors: elementwise ops, reductions and casts, without loops or shapes that depend on values.

A program has *axes*, and a value is one number for each position along some of them: `[rows, classes]` logits vary
along both axes, their maximum in each row along the first only. An op's result varies along all axes of its arguments,
so broadcasting needs no node. An input says for each dimension of its tensor which position to read, as a sum over
axes: that is its *access*. What a value varies along, and its dtype, is all there is to its type; sizes are given when the
program runs, or fixed.

Softmax cross-entropy of logits `[rows, classes]` and labels `[rows]`, and its gradient, as `to_text` writes it:

    program 1
    axes 0 10                   # two axes: any number of rows, and 10 classes
    tensor float32 2            # tensor 0, of two dimensions: the logits
    tensor int32 1              # tensor 1: the labels
    input 0 a0 a1               # node 0: logits[row, class]
    reduce max 0 1              # node 1: the maximum of node 0 over axis 1
    subtract 0 1                # node 2, and so on
    exp 2
    reduce sum 3 1
    log 4
    subtract 2 5                # node 6: log of the softmax
    input 1 a0                  # node 7: labels[row]
    position int32 1            # node 8: the position along axis 1, which is the class
    equal 7 8                   # node 9: bool
    constant float32 0.0
    select 9 6 10
    reduce sum 11 1
    negate 12                   # node 13: the loss of each row
    reduce mean 13 0            # node 14: the mean over rows
    divide 3 4                  # node 15: softmax
    cast float32 9
    subtract 15 16              # node 17: the gradient of the sum of the losses
    output 14                   # output 0, a scalar
    output 17 0 1               # output 1, [rows, classes]

The text, a line each, words separated by a space, no comments:

    program 1                   first
    axes SIZE...                second; 0: known when the program runs
    tensor DTYPE RANK           of each tensor that is read, in order
    NODE                        in topological order, numbered from 0
    output NODE AXIS...         of each output, in order: the axes that are its dimensions, among them all that the node
                                varies along

    NODE is one of
    input TENSOR INDEX...       one INDEX for each of the tensor's dimensions
    constant DTYPE VALUE        as Python's repr: 0.5, -inf, nan, 3, True
    position DTYPE AXIS         0, 1, 2, ... along an axis; an integer dtype
    cast DTYPE NODE             as TensorFlow casts
    reduce KIND NODE AXIS...    sum, mean, max, min, product (of numbers), any, all (of bool), over one axis or more
    OP NODE...                  an op of the table, with its arguments

    INDEX is terms joined by "+", without spaces. A term is one of
    3  -1                       a constant
    a1  2*a1  -1*a1             a position along axis 1, times a factor
    a1/4  3*a1/4%2              the same of the position divided by 4 (rounded down), modulo 2
    n5                          the value of node 5, of an integer dtype: a gather

So a transpose is `input 0 a1 a0`, a slice `input 0 2*a0+3`, a reversal of 10 positions `input 0 -1*a0+9`, a broadcast
leaves an axis out, and a reshape of `[6, 4]` to `[24]` is `input 0 a0/4 a0%4`. An index that is out of bounds for some
position is an error when the program runs.

DTYPE is float64, float32, float16, bfloat16, int64, int32 or bool. Half types are computed in float32 and rounded after
each op; a sum or product of them is accumulated in float32 and rounded once.
"""

from __future__ import annotations
