"""Comparisons, what combines them, and the choice that follows."""

from __future__ import annotations

import numpy as np

from custom_ops.expr.table_entry import BOOL, FRACTION, NUMBERS, Op, hull, no_derivative, where, within

# fmt: off
OPS = (
    Op("greater", 2, numpy=np.greater, cuda="{0} > {1}", cpp="a > b", derivative=no_derivative,
       interval=within(FRACTION), dtypes=NUMBERS, comparison=True, tf_ops=("Greater",), reversed_tf_ops=("Less",)),
    Op("greater_equal", 2, numpy=np.greater_equal, cuda="{0} >= {1}", cpp="a >= b", derivative=no_derivative,
       interval=within(FRACTION), dtypes=NUMBERS, comparison=True, tf_ops=("GreaterEqual",),
       reversed_tf_ops=("LessEqual",)),
    Op("equal", 2, numpy=np.equal, cuda="{0} == {1}", cpp="a == b", derivative=no_derivative,
       interval=within(FRACTION), dtypes=NUMBERS, comparison=True, commutative=True, tf_ops=("Equal",)),
    # a where c is not zero, else b: like SelectV2 it lets no NaN through from the side that is not chosen
    Op("select", 3, numpy=lambda condition, a, b: where(condition != 0, a, b), cuda="{0} ? {1} : {2}",
       cpp="a != zero ? b : c", derivative=lambda d: (None, d.where(d.x), d.where_not(d.x)),
       interval=lambda condition, a, b: hull(a, b), dtypes=NUMBERS + BOOL, tf_ops=("SelectV2", "Select")),
    Op("logical_and", 2, numpy=np.logical_and, cuda="{0} && {1}", cpp="a & b", derivative=no_derivative,
       interval=within(FRACTION), dtypes=BOOL, commutative=True, tf_ops=("LogicalAnd",)),
    Op("logical_or", 2, numpy=np.logical_or, cuda="{0} || {1}", cpp="a | b", derivative=no_derivative,
       interval=within(FRACTION), dtypes=BOOL, commutative=True, tf_ops=("LogicalOr",)),
    Op("logical_not", 1, numpy=np.logical_not, cuda="!{0}", cpp="a == zero ? one : zero", derivative=no_derivative,
       interval=within(FRACTION), dtypes=BOOL, tf_ops=("LogicalNot",)),
)
# fmt: on
