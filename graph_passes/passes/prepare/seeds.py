"""Random ops whose key and counter TensorFlow makes of a seed, which take the seed itself instead.

    FloorMod (int64) --> Cast (int32) --> StatelessRandomGetKeyCounter --> StatelessRandomUniformV2
    FloorMod (int64) ------------------------------------------------> StatelessRandomUniform

Both give the same numbers. StatelessRandomGetKeyCounter reads the seed in the host's memory, so a GPU's step waits
there for each of Keras's dropout layers; a kernel reads the seed in the device's memory.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.lower.known_numbers import integers, number_of

SEEDED = "StatelessRandomUniform"
_KEY, _COUNTER, _ALGORITHM = 1, 2, 3
_CHOSEN = ([1], [3])  # Philox, and what the device prefers, which is Philox on CPUs and GPUs
_INT32 = (1 << 31) - 1


@dataclass(frozen=True)
class Seeded:
    """A random op that takes a seed.

    Attributes:
        name: of the op.
        seed: two int64 numbers.
        replaced: names of the ops between the seed and this op that nothing else reads.
    """

    name: str
    seed: TensorId
    replaced: tuple[str, ...]


def seeded(graph: Graph, keep: Collection[str]) -> tuple[Seeded, ...]:
    """The random ops of a graph that can; the names of `keep` are fetched."""
    found = (_of(graph, node, keep) for node in graph if node.op == "StatelessRandomUniformV2")
    return tuple(each for each in found if each is not None)


def _of(graph: Graph, node: Node, keep: Collection[str]) -> Seeded | None:
    key, counter = node.inputs[_KEY], node.inputs[_COUNTER]
    maker = graph[key.node]
    same = maker.op == "StatelessRandomGetKeyCounter" and (key, counter) == tuple(
        TensorId(maker.name, index) for index in range(2)
    )
    if not same or node.name in keep or node.control or integers(graph, node.inputs[_ALGORITHM]) not in _CHOSEN:
        return None
    between, seed = [maker], maker.inputs[0]
    cast = graph[seed.node]
    if cast.op == "Cast" and _fits(graph, cast.inputs[0]):
        between, seed = [maker, cast], cast.inputs[0]
    spec = graph.specs.get(seed)
    if spec is None or spec.dtype != "int64" or any(each.control for each in between):
        return None
    last, replaced = node.name, [node.name]
    for each in between:
        if each.name in keep or any(reader != last for reader in graph.successors(each)):
            break
        replaced.append(each.name)
        last = each.name
    return Seeded(node.name, seed, tuple(replaced))


def _fits(graph: Graph, tensor: TensorId) -> bool:
    """Whether a cast from int64 to int32 keeps all numbers: those of a remainder are less than the divisor."""
    node, spec = graph[tensor.node], graph.specs.get(tensor)
    if node.op != "FloorMod" or spec is None or spec.dtype != "int64":
        return False
    divisor = number_of(graph, node.inputs[1])
    return divisor is not None and 0 < divisor <= _INT32
