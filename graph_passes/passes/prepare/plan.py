"""What is done to a graph after Grappler before its regions are planned: numbers that are equal are computed once,
batched products become one, and cheap values are computed again instead of being stored.

The hard case: one value with an early and a late reader, which no kernel can hold both.

    conv -> BiasAdd -+-> mean, variance, normalization -> (other layers) -> loss
                     +----------------------------------------------------> gradient      BiasAdd is stored for it

    conv -> BiasAdd ---> mean, variance, normalization -> (other layers) -> loss
         -> BiasAdd again ------------------------------------------------> gradient      nothing more is stored

`plan_prepare` has five steps:

    equal_numbers   numbers that several nodes compute alike are computed once (`analysis/equal_numbers.py`)
    einsums         einsums of two operands become a batched product (`einsum.py`)
    seeded          random ops take the seed of which their key and counter are made (`seeds.py`)
    flat_products   products whose batch can join the rows become one product (`graph/flatten.py`)
    recomputed      cheap values with a late reader get a second node for it (`copies.py`)
"""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes.analysis.equal_numbers import Equal, equal_numbers
from graph_passes.analysis.op_pattern import patterns_of
from graph_passes.graph.flatten import FlatProduct, flat_products
from graph_passes.graph.graph_source import Readable
from graph_passes.graph.ir import Graph
from graph_passes.passes.prepare.copies import Recomputed, recomputed
from graph_passes.passes.prepare.einsum import EinsumProduct, einsums
from graph_passes.passes.prepare.seeds import Seeded, seeded


@dataclass(frozen=True)
class Needs:
    """What planning takes.

    Attributes:
        whole: whether all of the graph runs. Else a caller may run some of it without the rest, and nothing is shared
            or computed again: what it then waits for might not be wanted.
    """

    whole: bool = True


@dataclass(frozen=True)
class PreparePlan:
    """What is done."""

    equal: tuple[Equal, ...]
    einsums: tuple[EinsumProduct, ...]
    seeded: tuple[Seeded, ...]
    products: tuple[FlatProduct, ...]
    recomputed: tuple[Recomputed, ...]


def plan_prepare(source: Readable, needs: Needs) -> tuple[PreparePlan, Graph]:
    """What is done to a graph, and the graph."""
    graph = source.read(functions=False)
    keep = source.keep(graph)
    known = patterns_of(graph)
    equal = equal_numbers(graph, known, keep) if needs.whole else ()
    again = recomputed(graph, known, keep) if needs.whole else ()
    return PreparePlan(equal, einsums(graph, keep), seeded(graph, keep), flat_products(graph, keep), again), graph
