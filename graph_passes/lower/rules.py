"""The rules of all ops that can be members of a kernel."""

from graph_passes.lower import (
    batch_norm,
    constants,
    cumulative,
    elementwise,
    gathers,
    gradients,
    layout_ops,
    products,
    ranks,
    reductions,
    segment_sums,
    softmax,
    stateless,
    updates,
)
from graph_passes.lower.rule import Rule

_MODULES = (
    batch_norm, constants, cumulative, elementwise, gathers, gradients, layout_ops, products, ranks, reductions,
    segment_sums, softmax, stateless, updates,
)  # fmt: skip

RULES: dict[str, Rule] = {name: rule for module in _MODULES for name, rule in module.RULES.items()}
