"""The process of `tests.soak` that optimises mutated graphs: seeds come in, what came of each goes out.

    python -m tests.soak.worker          # with tfmem
    python -m tests.soak.worker plain    # TensorFlow alone, to tell whose an abort is

It may be ended by a graph at any time; what it was about is the last line that it wrote."""

from __future__ import annotations

import functools
import json
import os
import random
import resource
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow.python.framework import kernels
from tensorflow.python.grappler import cluster as grappler_cluster
from tensorflow.python.grappler import tf_optimizer

import tfmem
from tests.soak.graphs import NEEDED, feeds, graph_defs
from tests.soak.mutations import mutated

ADDRESSES = 12 << 30  # bytes that a process may map, so that a graph that asks for all memory gets an error
LARGEST_RUN = 64 << 20  # bytes of all tensors of known size in a graph that is run
SECONDS_OF_A_RUN = 10
CLOSE = {"rtol": 1e-2, "atol": 1e-4}
v1 = tf.compat.v1


@dataclass(frozen=True)
class Case:
    """What one seed stands for."""

    base: str
    graph_def: Any
    arguments: Mapping[str, Any]
    live: bool  # as a tf.Graph, edited in place

    @classmethod
    def of(cls, seed: int, bases: Mapping[str, Any]) -> Case:
        """One graph for each seed, always the same; some are not mutated at all."""
        dice = random.Random(seed)
        base = dice.choice(sorted(bases))
        graph_def = mutated(bases[base], dice) if dice.random() < 0.98 else bases[base]
        arguments: dict[str, Any] = {"device": "CPU:0"}
        if dice.random() < 0.8:
            arguments["fetches"] = dice.choice([["loss", "train"], ["loss:0", "train"], ["loss"], ["train"]])
        if dice.random() < 0.2:
            arguments["policy"] = dice.choice(["autovm", "vdnn_all", "vdnn_conv"])
        if dice.random() < 0.1:
            arguments["input_shapes"] = {"x": dice.choice([(8, 16, 16, 3), (), (2, 2), (1,) * 9])}
        least, most = NEEDED[base]
        arguments["memory_budget"] = f"{round(dice.uniform(0.9 * least, 1.1 * most))}KiB"
        return cls(base, graph_def, arguments, dice.random() < 0.05)


def main() -> None:
    """Answer seeds until there are none."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))

    def tell(**values: Any) -> None:
        print(json.dumps(values), file=out, flush=True)

    tf.config.set_visible_devices([], "GPU")
    # Looked up again for each graph, this takes longer than all the rest.
    kernels.get_registered_kernels_for_op = functools.cache(kernels.get_registered_kernels_for_op)
    bases = graph_defs()
    work = plain if sys.argv[1:] == ["plain"] else optimised
    tell(ready=True)
    for line in sys.stdin:
        case = Case.of(int(line), bases)
        tell(base=case.base, **work(case, lambda stage: tell(stage=stage)))


def plain(case: Case, stage: Callable[[str], None]) -> dict[str, Any]:
    """What TensorFlow does with the graph by itself."""
    stage("import")
    graph = tf.Graph()
    try:
        with graph.as_default():
            tf.graph_util.import_graph_def(case.graph_def, name="")
    except (ValueError, TypeError, KeyError, tf.errors.OpError) as error:
        return {"outcome": NOT_IMPORTED, "error": _short(error)}
    for name, attempt in (("grappler", _grappler), ("session", _run), ("function", _function)):
        stage(name)
        try:
            attempt(case.graph_def)
        except Exception as error:  # whatever it is, it is not the end of the process
            stage(f"{name}: {_short(error)}")
    return {"outcome": "TensorFlow survives it"}


def _grappler(graph_def: Any) -> None:
    read = {name.lstrip("^").partition(":")[0] for node in graph_def.node for name in node.input}
    meta_graph = meta_graph_pb2.MetaGraphDef(graph_def=graph_def)
    meta_graph.collection_def["train_op"].node_list.value.extend(n.name for n in graph_def.node if n.name not in read)
    cluster = grappler_cluster.Cluster()
    tf_optimizer.OptimizeGraph(v1.ConfigProto(), meta_graph, cluster=cluster)


def _function(graph_def: Any) -> None:
    def imported() -> Any:
        return tf.graph_util.import_graph_def(graph_def, name="", return_elements=["loss:0"])

    wrapped = v1.wrap_function(imported, [])
    names = [op.outputs[0] for op in wrapped.graph.get_operations() if op.type == "Placeholder"]
    wrapped.prune(names, "loss:0")(*(tf.constant(value) for value in feeds(wrapped.graph).values()))


def optimised(case: Case, stage: Callable[[str], None]) -> dict[str, Any]:
    """What tfmem makes of the graph, without a budget and with one."""
    without = {name: value for name, value in case.arguments.items() if name != "memory_budget"}
    first = _optimise(case, without, stage)
    if first["outcome"] in (*FAULTS, NOT_IMPORTED):
        return first
    second = _optimise(case, dict(case.arguments), stage)
    return second if second["outcome"] in FAULTS else second | {"without": first["outcome"]}


FAULTS = ("fault", "differs", "does not run")
UNORDERED = "not comparable: variables of TensorFlow 1 that nothing orders"
NOT_IMPORTED = "TensorFlow does not import it"


def _optimise(case: Case, arguments: dict[str, Any], stage: Callable[[str], None]) -> dict[str, Any]:
    options = {"arguments": {name: str(value) for name, value in arguments.items()}, "live": case.live}
    stage(f"optimise {json.dumps(options)}")
    try:
        result, before = _call(case, arguments)
    except tfmem.TfmemError as error:
        if str(error).startswith("TensorFlow cannot import"):
            return {"outcome": NOT_IMPORTED, "error": _short(error)}
        return {"outcome": type(error).__name__, "error": _short(error)}
    except _NotImportedError as error:
        return {"outcome": NOT_IMPORTED, "error": _short(error)}
    except Exception as error:  # what the soak is for
        if _does_not_import(case.graph_def):
            return {"outcome": NOT_IMPORTED, "error": _short(error)}
        return {"outcome": "fault", "error": _short(error), "trace": traceback.format_exc()[-4000:], **options}
    ours = sorted({node.op for node in result.node if node.op.startswith(("MemOp", "Tfmem"))})
    theirs = {node.op for node in case.graph_def.node}
    if result == before:
        return {"outcome": "unchanged"}
    if not set(ours) - theirs:
        changed = "edited"  # chains are computed again, or ops wait for others
    else:
        changed = "replaced" if any(op.startswith("Tfmem") for op in ours) else "moved"
    stage("run")
    verdict = _compare(before, result)
    return verdict | options if verdict["outcome"] in FAULTS else {"outcome": f"{changed}, {verdict['outcome']}"}


class _NotImportedError(Exception):
    """TensorFlow refuses the graph before tfmem sees it."""


def _call(case: Case, arguments: dict[str, Any]) -> tuple[Any, Any]:
    """What `optimize` returns, and what went in, as GraphDefs."""
    if not case.live:
        before = case.graph_def
        return tfmem.optimize(before, **arguments), before
    graph = tf.Graph()
    try:
        with graph.as_default():
            tf.graph_util.import_graph_def(case.graph_def, name="")
    except Exception as error:
        raise _NotImportedError(str(error)) from error
    before = graph.as_graph_def()
    return tfmem.optimize(graph, **arguments).as_graph_def(), before


def _does_not_import(graph_def: Any) -> bool:
    try:
        with tf.Graph().as_default():
            tf.graph_util.import_graph_def(graph_def, name="")
    except Exception:
        return True
    return False


def _compare(before: Any, after: Any) -> dict[str, Any]:
    try:
        wanted = _run(before)
        again = _run(before, tfmem.session_config(_WITHOUT_GRAPPLER))  # in another order, too
    except Exception as error:
        return {"outcome": "the original does not run", "error": _short(error)}
    if wanted is None or again is None:
        return {"outcome": "too large to run"}
    if not _same(wanted, again):
        return {"outcome": "the original does not repeat itself"}
    try:
        found = _run(after, tfmem.session_config())
    except Exception as error:
        if _is_unordered(before):
            return {"outcome": UNORDERED}
        return {"outcome": "does not run", "error": _short(error), "trace": str(error)[-2000:]}
    if found is not None and not _same(wanted, found) and _is_unordered(before):
        return {"outcome": UNORDERED}
    if found is not None and not _same(wanted, found):
        return {"outcome": "differs", "error": f"{wanted} before, {found} after"}
    return {"outcome": "equal"}


_WITHOUT_GRAPPLER = v1.ConfigProto()
_WITHOUT_GRAPPLER.graph_options.rewrite_options.disable_meta_optimizer = True


def _is_unordered(graph_def: Any) -> bool:
    """Whether a mutation can have made a step race with its updates: variables are read where they lie, or the step
    itself initialises them, and nothing says whether that is before it reads them."""
    nodes = {node.name: node for node in graph_def.node}
    needed, waiting = set[str](), [name for name in ("loss", "train") if name in nodes]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += [text.removeprefix("^").partition(":")[0] for text in nodes[name].input]
    return "initialize" in needed or any(node.op in ("Variable", "VariableV2") for node in graph_def.node)


def _same(wanted: list[Any], found: list[Any]) -> bool:
    pairs = zip(wanted, found, strict=True)
    return all(np.shape(a) == np.shape(b) and np.allclose(a, b, equal_nan=True, **CLOSE) for a, b in pairs)


def _run(graph_def: Any, config: Any = None) -> list[Any] | None:
    """The losses of three steps; None for a graph that is too large to be run."""
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(graph_def, name="")
        names = {op.name for op in graph.get_operations()}
        tensors = [tensor for op in graph.get_operations() for tensor in op.outputs]
        if sum(_nbytes(tensor) for tensor in tensors) > LARGEST_RUN:
            return None
        config = config or v1.ConfigProto()
        config.intra_op_parallelism_threads = config.inter_op_parallelism_threads = 1
        config.operation_timeout_in_ms = 1000 * SECONDS_OF_A_RUN
        given = feeds(graph)
        with v1.Session(graph=graph, config=config) as session:
            if "initialize" in names:
                session.run("initialize")
            train = ["train"] if "train" in names else []
            return [session.run(["loss:0", *train], given)[0] for _ in range(3)]


def _nbytes(tensor: Any) -> float:
    return float(np.prod(tensor.shape.as_list(), dtype=float)) * 4 if tensor.shape.is_fully_defined() else 0.0


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


if __name__ == "__main__":
    main()
