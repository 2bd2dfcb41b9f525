"""What a batch reads of weights from off the chip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from custom_ops.dynamic.codegen.on_chip import ChipPlan, holder, nodes_of
from custom_ops.dynamic.codegen.segments import KindCode, MatrixView


def products_of(plan: ChipPlan, kinds: Sequence[KindCode], nodes: Sequence[int]) -> dict[MatrixView, int]:
    """How many nodes of a batch multiply by each view, in forward and backward, given those of each kind."""
    counts: dict[MatrixView, int] = {}
    for kind, count in zip(kinds, nodes, strict=True):
        for section in kind.sections:
            for segment in section.segments:
                if segment.call is not None:
                    view = plan.residences[holder(plan, segment.call.view)].view
                    counts[view] = counts.get(view, 0) + count
    return counts


def weight_traffic(plan: ChipPlan, products: Mapping[MatrixView, int]) -> tuple[int, int]:
    """Bytes of weights that a batch reads from off the chip: under this plan, and if each product read its matrix.

    `products`: how many nodes of the batch multiply by each view.
    """
    with_plan = each = 0
    for residence in plan.residences:
        size, count = 4 * residence.view.weights, products.get(residence.view, 0)
        each += size * count
        with_plan += size if residence.home != "L2" else size * -(-count // nodes_of(residence))
    return with_plan, each
