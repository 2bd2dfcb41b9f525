"""Brings the bodies of called functions to the top level, so that passes see every op of a training
step.

Done here and not left to Grappler, which keeps calls marked `_noinline` or `_XlaMustCompile`, keeps
those that are fetched, and turns functional control flow into cyclic frames while it inlines.
Rules:

    call:0, call:1 ...     become the tensors that the body returns
    ^call                  becomes a NoOp of the same name that waits for the body's stateful ops,
    reads included, random ones not
    body op "op"           is called "call/op"; a stateful one waits for what the call waited for
    body op's device       is the call's where it has none

While, If and Case stay as they are (their bodies are not touched), and so do calls of functions
with several implementations (`api_implements`, left for Grappler to choose) and graphs with Switch
and Enter ops, where an op's place in its frame would be lost.

A function that XLA has to compile stays, too, unless it updates variables: it may hold what runs in
no other way (on a CPU Keras gives XLA convolutions of groups), and what its backward pass needs of
it are tensors of the graph. One with updates is a whole training step, of which XLA's mark is
dropped: what is inlined runs op by op.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef

from graph_passes.errors import GraphError
from graph_passes.graph.ops import is_update
from graph_passes.graph.serde import MOST_OUTPUTS
from tfmem.capture.captured import (
    RANDOM,
    Captured,
    called_by,
    every_node,
    free_name,
    is_compiled,
    is_stateful,
    op_definition,
    op_name,
)

MOST_CALLS = 100_000
DEEPEST = 200  # calls in calls
CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
FRAMES = frozenset({"Enter", "RefEnter", "Switch", "RefSwitch"})


def inline_captured(captured: Captured, implementations: Collection[str] = ()) -> Captured:
    """`captured` with every call of its graph inlined that can be.

    Nodes are in creation order if those of the graph and of its library were. A call whose outputs are fetched becomes
    an `IdentityN` of its name.

    Args:
        captured: not changed.
        implementations: names of functions with `api_implements` that are inlined all the same.

    Raises:
        GraphError: a call names a function that is not in the library, or a function calls itself.
    """
    ops = {node.op for node in captured.graph_def.node}
    if ops & FRAMES or not ops & CALLS:
        return captured
    inliner = _Inliner(captured, implementations)
    return replace(captured, graph_def=inliner.run(), origins=inliner.origins)


def implementations(graph_def: GraphDef) -> dict[str, list[str]]:
    """Functions with `api_implements` that are called, and the names of the ops that call them, at any depth.

    An op of an inlined function is called "call/op", so these are the last parts of the final names.
    """
    several = {f.signature.name for f in graph_def.library.function if "api_implements" in f.attr}
    found: dict[str, list[str]] = {}
    for node in every_node(graph_def):
        called = node.attr["f"].func.name if node.op in CALLS else ""
        if called in several:
            found.setdefault(called, []).append(node.name)
    return found


class _Inliner:
    def __init__(self, captured: Captured, implementations: Collection[str]) -> None:
        self.source = captured.graph_def
        self.origins = dict(captured.origins)
        self.fetched = {op_name(name) for name in captured.fetches}
        self.implementations = implementations
        self.library = {function.signature.name: function for function in self.source.library.function}
        self.taken = {node.name for node in self.source.node}
        self.calls = 0
        self.results: dict[str, str] = {}  # "call:1" -> the tensor it stands for, which may itself be in here

    def run(self) -> GraphDef:
        result = GraphDef(versions=self.source.versions, library=self.source.library)
        for node in self.source.node:
            result.node.extend(self.expand(node, ()))
        for node in result.node:
            node.input[:] = [self.resolve(name) for name in node.input]
        return result

    def resolve(self, name: str) -> str:
        while name in self.results:
            name = self.results[name]
        return name

    def expand(self, node: NodeDef, callers: tuple[str, ...]) -> Iterator[NodeDef]:
        function = self.library.get(node.attr["f"].func.name) if node.op in CALLS else None
        if node.op in CALLS and function is None:
            raise GraphError(
                f"op '{node.name}' calls function '{node.attr['f'].func.name}', not found in the "
                "graph's library; capture the graph together with its functions"
            )
        if function is None or not _can_inline(function, self.implementations) or self.stays_compiled(node, function):
            yield node
            return
        name = function.signature.name
        self.calls += 1
        if self.calls > MOST_CALLS or len(callers) > DEEPEST:
            raise GraphError(
                f"functions call functions more than {MOST_CALLS:,} times in all, or {DEEPEST} deep, so that their ops "
                "cannot be brought to the top level; is the graph broken?"
            )
        if name in callers:
            raise GraphError(
                f"function '{name}', called by op '{node.name}', calls itself, so that its ops "
                "cannot be brought to the top level; write the recursion as a loop"
            )
        try:
            yield from self.body(node, function, (*callers, name))
        except GraphError:
            raise
        except (KeyError, ValueError) as error:
            raise GraphError(
                f"function '{name}', called by op '{node.name}', is broken: it reads, returns or takes what is not "
                f"there ({error}); save the graph again together with its functions"
            ) from error

    def stays_compiled(self, call: NodeDef, function) -> bool:  # type: ignore[no-untyped-def]
        """Whether XLA compiles the function, and neither it nor what it calls updates a variable."""
        if not (is_compiled(call) or is_compiled(function)):
            return False
        seen = {function.signature.name}
        pending = [function]
        while pending:
            nodes = pending.pop().node_def
            if any(is_update(node.op) for node in nodes):
                return False
            more = [name for name in called_by(nodes) if name in self.library and name not in seen]
            seen.update(more)
            pending += [self.library[name] for name in more]
        return True

    def body(self, call: NodeDef, function, callers: tuple[str, ...]) -> Iterator[NodeDef]:  # type: ignore[no-untyped-def]
        data = [name for name in call.input if not name.startswith("^")]
        waits = [name for name in call.input if name.startswith("^")]
        arguments = {argument.name: tensor for argument, tensor in zip(function.signature.input_arg, data, strict=True)}
        names = {node.name: free_name(f"{call.name}/{node.name}", self.taken) for node in function.node_def}
        self.origins.update((new, (function.signature.name, old)) for old, new in names.items())
        tensors = arguments | dict(self.flat_names(function, names))

        if len(waits) > 1:
            gate = NodeDef(
                name=free_name(f"{call.name}/control_inputs", self.taken),
                op="NoOp",
                input=waits,
                device=call.device,
            )
            yield gate
            waits = [f"^{gate.name}"]
        running = []
        for original in function.node_def:
            node = NodeDef()
            node.CopyFrom(original)
            node.name = names[original.name]
            node.device = original.device or call.device
            inputs = [_rename_input(name, tensors, names, arguments) for name in original.input]
            if self.is_stateful(original):
                running += [node.name] if original.op not in RANDOM else []
                inputs += [name for name in waits if name not in inputs]
            node.input[:] = inputs
            _rename_colocation(node, names)
            yield from self.expand(node, callers)

        returned = [tensors[function.ret[result.name]] for result in function.signature.output_arg]
        done = [names[name] for name in function.control_ret.values()] + running
        end = NodeDef(name=call.name, op="NoOp", device=call.device)
        if call.name in self.fetched and returned:
            end.op = "IdentityN"
            end.attr["T"].CopyFrom(call.attr["Tout"])
            end.input.extend(returned)
        end.input.extend(f"^{name}" for name in dict.fromkeys(done or map(op_name, returned)))
        for index, tensor in enumerate(returned):
            if end.op == "NoOp":
                self.results[f"{call.name}:{index}"] = tensor
                if index == 0:
                    self.results[call.name] = tensor
        yield end

    def flat_names(self, function, names: dict[str, str]) -> Iterator[tuple[str, str]]:  # type: ignore[no-untyped-def]
        """How a body writes the outputs of its ops ("op:output:1"), and how a graph writes them
        ("call/op:3").
        """
        for node in function.node_def:
            definition = self.library[node.op].signature if node.op in self.library else op_definition(node.op)
            if definition is None:
                raise GraphError(
                    f"function '{function.signature.name}' uses op type '{node.op}', which is not "
                    "registered; load the library that defines it first (tf.load_op_library)"
                )
            index = 0
            for output in definition.output_arg:
                for place in range(_output_count(output, node)):
                    flat = names[node.name] if index == 0 else f"{names[node.name]}:{index}"
                    yield f"{node.name}:{output.name}:{place}", flat
                    index += 1

    def is_stateful(self, node: NodeDef) -> bool:
        if node.op in self.library:
            return self.library[node.op].signature.is_stateful
        return is_stateful(node.op)


def _can_inline(function, implementations: Collection[str]) -> bool:  # type: ignore[no-untyped-def]
    parametrized = any(value.placeholder for node in function.node_def for value in node.attr.values())
    frames = any(node.op in FRAMES for node in function.node_def)
    chosen = "api_implements" not in function.attr or function.signature.name in implementations
    return chosen and not parametrized and not frames


def _output_count(output, node: NodeDef) -> int:  # type: ignore[no-untyped-def]
    if output.number_attr:
        return min(max(node.attr[output.number_attr].i, 0), MOST_OUTPUTS)
    if output.type_list_attr:
        return len(node.attr[output.type_list_attr].list.type)
    return 1


def _rename_input(name: str, tensors: dict[str, str], names: dict[str, str], arguments: dict[str, str]) -> str:
    if not name.startswith("^"):
        return tensors[name]
    before = name[1:]
    return f"^{names[before] if before in names else op_name(arguments[before])}"


def _rename_colocation(node: NodeDef, names: dict[str, str]) -> None:
    if "_class" not in node.attr:
        return
    groups = [value.decode(errors="backslashreplace") for value in node.attr["_class"].list.s]
    kept = [f"loc:@{names[g.removeprefix('loc:@')]}" for g in groups if g.removeprefix("loc:@") in names]
    del node.attr["_class"]
    if kept:
        node.attr["_class"].list.s.extend(group.encode() for group in kept)
