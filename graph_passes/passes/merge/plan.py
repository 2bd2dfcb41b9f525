"""Large products of one operand that are one product, and products that are added up that are one of a larger depth,
where a device was measured to be faster so. Such are an attention's queries, keys and values, and their gradients.

    x Wq, x Wk, x Wv                   = the columns of x [Wq Wk Wv]
    dq Wq^T + dk Wk^T + dv Wv^T        = [dq dk dv] [Wq Wk Wv]^T
    x^T dq, x^T dk, x^T dv             = the columns of x^T [dq dk dv]

Weights are variables, which lie apart, so that they are copied for it; what a kernel makes it can write side by side.
Small products are not merged here: a kernel multiplies those of one operand without a copy (`fuse/partition/mixed.py`).

The hard case: three products and their gradients share one copy, which pays only if all of them are merged.

    x --+-- Wq, Wk, Wv side by side ----> q k v          forward: the copy of W costs more than the one product saves
        |         |                                      backward: it needs the same copy
    dx <+--- transposed <---- dq dk dv side by side      both together: worth it

    _Finder.groups   products of one operand, and products that are added up, that may be one
    _families        groups that share what is put side by side
    _best            the groups of a family that save the most; leaving out one group after the other
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from custom_ops.jit.cublas import SIZES, MatrixProduct
from graph_passes.analysis.cost.kernel_costs import Beside, KernelDevice, Small
from graph_passes.analysis.op_pattern import IN_KERNELS, OpPattern, patterns_of
from graph_passes.graph.flatten import WIDE
from graph_passes.graph.graph_source import Readable
from graph_passes.graph.ir import Graph, Node, TensorId, boolean, texts
from graph_passes.graph.ops import viewed
from graph_passes.graph.order import topological

LEAST = 0.02  # of the products' time: what merging has to save, more than times scatter


@dataclass(frozen=True)
class JoinedMatrices:
    """Matrices side by side, or one below the other (axis 0); one stays as it is."""

    parts: tuple[TensorId, ...]
    axis: int = 1


@dataclass(frozen=True)
class Group:
    """Products that may be one.

    Attributes:
        products: names of their nodes.
        left, right: the operands of the one.
        apart, merged: the products' forms, and the one's.
        total: the name of the node that adds the products up; "" if their results lie side by side.
        between: names of the reshapes from the products to `total`.
        rest: what else that adds up.
    """

    products: tuple[str, ...]
    left: JoinedMatrices
    right: JoinedMatrices
    apart: tuple[MatrixProduct, ...]
    merged: MatrixProduct
    total: str = ""
    between: tuple[str, ...] = ()
    rest: tuple[TensorId, ...] = ()

    @property
    def forms(self) -> tuple[tuple[MatrixProduct, ...], tuple[MatrixProduct, ...]]:
        """Apart, and as one."""
        return self.apart, (self.merged,)

    @property
    def joins(self) -> tuple[JoinedMatrices, ...]:
        """What has to be put side by side."""
        return tuple(each for each in (self.left, self.right) if len(each.parts) > 1)


@dataclass(frozen=True)
class Needs:
    """What planning takes.

    Attributes:
        device: that runs the graph.
        beside: times the library's products (see `Beside`); None: none may be timed, and nothing is merged.
        whole: whether all of the graph runs; else a caller may run some of it without the rest, and nothing is merged.
    """

    device: KernelDevice
    beside: Beside | None = None
    whole: bool = True


@dataclass(frozen=True)
class MergePlan:
    """What is merged.

    Attributes:
        families: groups of products; those of a family share what is put side by side.
    """

    families: tuple[tuple[Group, ...], ...]


def plan_merge(source: Readable, needs: Needs) -> tuple[MergePlan, Graph]:
    """What is merged of a graph, and the graph."""
    graph = source.read(functions=False)
    beside, small = needs.beside, needs.device.most
    if beside is None or small is None or not needs.whole:
        return MergePlan(()), graph
    finder = _Finder(graph, source.keep(graph), small)
    groups = finder.groups()
    # Equal layers have equal forms, and each is timed once.
    times = {forms: beside(forms) for forms in dict.fromkeys(each for group in groups for each in group.forms)}
    saves: dict[Group, float] = {}  # more than the least that is worth it
    for group in groups:
        apart, merged = (times[forms] for forms in group.forms)
        if apart is not None and merged is not None:
            saves[group] = apart - merged - LEAST * apart

    def saved(family: Sequence[Group]) -> float:
        joins = dict.fromkeys(join for group in family for join in group.joins)
        copied = sum(needs.device.seconds(2 * finder.copied(join)) for join in joins if finder.copied(join))
        return sum(saves[group] for group in family) - copied

    families = (_best(family, saved) for family in _families([group for group in groups if group in saves]))
    return MergePlan(tuple(family for family in families if family)), graph


def _families(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups that share a join, in the order in which they were found."""
    families: list[list[Group]] = []
    for group in groups:
        alike = [family for family in families if any(join in other.joins for join in group.joins for other in family)]
        families = [family for family in families if family not in alike]
        families.append([*(each for family in alike for each in family), group])
    return families


def _best(family: Sequence[Group], saved: Callable[[Sequence[Group]], float]) -> tuple[Group, ...]:
    """The groups of a family that save the most, found by leaving out one after the other; none if nothing is saved."""
    best = list(family)
    while best:
        fewer = [[other for other in best if other is not each] for each in best]
        better = max(fewer, key=saved)
        if saved(better) <= saved(best):
            break
        best = better
    return tuple(best) if best and saved(best) > 0 else ()


class _Finder:
    """Finds the groups of a graph."""

    def __init__(self, graph: Graph, keep: Collection[str], small: Small) -> None:
        self._graph, self._keep, self._small = graph, keep, small
        self._kinds = {name: each.pattern for name, each in patterns_of(graph).items()}
        self._order = topological(graph)
        self._place: Mapping[str, int] = {name: place for place, name in enumerate(self._order)}
        self._matrices: dict[tuple[TensorId, tuple[int, ...]], TensorId] = {}  # one for all views that are alike
        self._joined: dict[tuple[frozenset[TensorId], int], JoinedMatrices] = {}  # one order for what is joined twice
        self._forms = {name: form for name in self._order if (form := self._form(graph[name])) is not None}

    def groups(self) -> list[Group]:
        """All: sums, which say in what order operands lie side by side, and then those of one operand."""
        sums = list(self._sums())
        return [*sums, *self._of_one_operand({name for group in sums for name in group.products})]

    def copied(self, join: JoinedMatrices) -> int:
        """Bytes that are copied for a join; 0 if kernels write all parts."""
        by_kernels = all(
            self._kinds[viewed(self._graph, part, self._is_view).node] in IN_KERNELS - {OpPattern.VIEW}
            for part in join.parts
        )
        return 0 if by_kernels else sum(map(self._graph.nbytes, join.parts))

    def _of_one_operand(self, added: Collection[str]) -> Iterator[Group]:
        """Groups of products that are in no sum and share an operand."""
        found: dict[object, list[list[str]]] = {}
        for name, form in self._forms.items():
            if name in added:
                continue
            key = self._operand(name, 0), replace(form, columns=0), self._graph[name].device
            alike = found.setdefault(key, [])
            beside = [group for group in alike[-1:] if not self._waits(name, group)]
            if beside:
                beside[0].append(name)
            else:
                alike.append([name])
        for names in (group for alike in found.values() for group in alike):
            by_matrix = {self._operand(name, 1): name for name in reversed(names)}
            if len(by_matrix) < 2:
                continue
            first = self._forms[names[0]]
            right = self._join([self._operand(name, 1) for name in names], 0 if first.right_transposed else 1)
            ordered = tuple(by_matrix[part] for part in right.parts)
            apart = tuple(self._forms[name] for name in ordered)
            merged = replace(first, columns=sum(form.columns for form in apart))
            yield Group(ordered, JoinedMatrices((self._operand(names[0], 0),)), right, apart, merged)

    def _sums(self) -> Iterator[Group]:
        for name in self._order:
            node = self._graph[name]
            if node.op == "AddN" and not node.control and name not in self._keep and not self._graph.waiting(node):
                group = self._sum(node)
                if group is not None:
                    yield group

    def _sum(self, node: Node) -> Group | None:
        """The products of one form among those that a node adds up."""
        graph, between = self._graph, dict[str, list[str]]()
        rest = list(node.inputs)
        for tensor in node.inputs:
            views, at = list[str](), tensor
            while self._kinds[at.node] is OpPattern.VIEW and self._is_inner(at.node):
                views.append(at.node)
                at = graph[at.node].inputs[0]
            form = self._forms.get(at.node)
            first = self._forms[next(iter(between))] if between else form
            if form is None or first is None or not self._is_inner(at.node) or at.node in between:
                continue
            if graph[at.node].op != "MatMul" or graph[at.node].device != node.device:  # a bias would be added, too
                continue
            if form.dtype in WIDE and replace(form, depth=0) == replace(first, depth=0):
                between[at.node] = views
                rest.remove(tensor)
        if len(between) < 2:
            return None
        pairs = {(self._operand(name, 0), self._operand(name, 1)): name for name in between}
        lefts, rights = zip(*pairs, strict=True)
        if len(set(lefts)) < len(between) or len(set(rights)) < len(between):
            return None  # an operand of two of them would have to be there twice
        form = self._forms[next(iter(between))]
        right = self._join(rights, 1 if form.right_transposed else 0)
        order = [next(pair for pair in pairs if pair[1] == part) for part in right.parts]
        left = JoinedMatrices(tuple(pair[0] for pair in order), 0 if form.left_transposed else 1)
        self._joined.setdefault((frozenset(lefts), left.axis), left)
        ordered = tuple(pairs[pair] for pair in order)
        apart = tuple(self._forms[name] for name in ordered)
        return Group(
            ordered,
            left,
            right,
            apart,
            replace(form, depth=sum(each.depth for each in apart)),
            node.name,
            tuple(view for name in ordered for view in between[name]),
            tuple(rest),
        )

    def _form(self, node: Node) -> MatrixProduct | None:
        """The form of a product that is large and may be replaced; else None."""
        graph = self._graph
        if node.op not in ("MatMul", "_FusedMatMul") or node.name in self._keep or node.control or graph.waiting(node):
            return None
        operands = (*node.inputs[:2], TensorId(node.name))
        left, right, result = (graph.sizes(tensor) for tensor in operands)
        dtype = graph.specs[TensorId(node.name)].dtype
        if left is None or right is None or result is None or dtype not in SIZES:
            return None
        if node.op == "_FusedMatMul" and (texts(node.attrs["fused_ops"]) != ("BiasAdd",) or dtype not in WIDE):
            return None  # half types are rounded once behind both
        flipped = boolean(node.attrs.get("transpose_a")), boolean(node.attrs.get("transpose_b"))
        depth = left[0] if flipped[0] else left[1]
        operations = result[0] * result[1] * depth
        moved = sum(map(graph.nbytes, operands))
        if operations <= self._small.operations and moved <= self._small.nbytes:
            return None
        form = MatrixProduct(result[0], result[1], depth, dtype=dtype)
        return replace(form, left_transposed=flipped[0], right_transposed=flipped[1])

    def _is_view(self, name: str) -> bool:
        return self._kinds[name] is OpPattern.VIEW and not self._graph[name].control

    def _operand(self, name: str, which: int) -> TensorId:
        """An operand of a product; the same for all products whose operands are the same matrix."""
        tensor = self._graph[name].inputs[which]
        return self._matrices.setdefault(
            (viewed(self._graph, tensor, self._is_view), self._graph.sizes(tensor) or ()), tensor
        )

    def _join(self, parts: Sequence[TensorId], axis: int) -> JoinedMatrices:
        """The join of these matrices, each once."""
        parts = tuple(dict.fromkeys(parts))
        return self._joined.setdefault((frozenset(parts), axis), JoinedMatrices(parts, axis))

    def _is_inner(self, name: str) -> bool:
        """Whether a node has one reader and no control edge, and is not fetched."""
        node = self._graph[name]
        alone = len(self._graph.uses(TensorId(name))) == 1 and not self._graph.waiting(node)
        return alone and not node.control and name not in self._keep

    def _waits(self, name: str, products: Sequence[str]) -> bool:
        """Whether a product waits for one of others that come before it in the graph's order."""
        first, wanted = self._place[products[0]], set(products)
        pending, seen = [name], set[str]()
        while pending:
            for before in self._graph.predecessors(self._graph[pending.pop()]):
                if before in wanted:
                    return True
                if self._place[before] > first and before not in seen:
                    seen.add(before)
                    pending.append(before)
        return False
