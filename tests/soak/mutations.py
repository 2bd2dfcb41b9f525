"""Mutations of a GraphDef for `tests.soak`: what a broken exporter, an old file or a stranger could bring."""

from __future__ import annotations

import random
from collections.abc import Callable, MutableSequence
from typing import Any

import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.core.framework.graph_pb2 import GraphDef

INTEGERS = [-(2**63), -(2**31), -7, -1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1]
SIZES = [-(2**40), -2, -1, 0, 1, 2, 3, 4, 6, 8, 16, 1000, 2**31, 2**40, 2**62]
FLOATS = [0.0, -1.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan")]
NAMES = ["", "x", "loss", "a/b", "^x", "x:1", "ü", "a b", "_x", "x" * 300, "/", "loop/while", "\x00"]
DEVICES = ["/device:CPU:0", "/device:GPU:7", "CPU", "/job:worker/task:3", "nonsense", "/device:XLA_CPU:0", "/"]
OPS = ["NoSuchOp", "Identity", "IdentityN", "Relu", "AddV2", "MatMul", "Const", "Placeholder", "NoOp", "While", "If"]
OPS += ["StatelessWhile", "PartitionedCall", "Case", "Merge", "Switch", "Enter", "Exit", "NextIteration", "LoopCond"]
OPS += ["ReadVariableOp", "VarHandleOp", "AssignSubVariableOp", "Conv2D", "FusedBatchNormV3", "Pack", "Unpack", "Split"]
OPS += ["MemOpOffload", "MemOpAwait", "MemOpProbe", "TfmemRecurrent", "TfmemMatMul", "_Arg", "_Retval", "Reshape"]
OPS += ["TensorListStack", "TensorListReserve", "CudnnRNNV3", "Shape", "Cast", "Concat", "ConcatV2", "StridedSlice"]
OPS += ["TfmemStepDraws"]
TYPES = [0, 1, 2, 3, 4, 7, 9, 10, 14, 19, 20, 21, 23, 100, 101, 999]
MARKS = ["_output_shapes", "_class", "_XlaMustCompile", "_tfmem_report", "_handle_shapes", "shape"]
MARKS += ["_handle_dtypes", "_lower_using_switch_merge", "T", "_num_original_outputs", "api_implements", "_noinline"]

Nodes = MutableSequence[Any]
Mutation = Callable[[random.Random, Any, Nodes], None]  # the dice, the GraphDef, the nodes of it or of one function


def mutated(graph_def: Any, dice: random.Random) -> Any:
    """A copy with one to three mutations."""
    result = GraphDef()
    result.CopyFrom(graph_def)
    for _ in range(dice.choice([1, 1, 1, 1, 1, 2, 2, 3])):
        functions = result.library.function
        inside = functions and dice.random() < 0.4
        nodes = dice.choice(functions).node_def if inside else result.node
        if nodes:
            dice.choices(MUTATIONS, WEIGHTS)[0](dice, result, nodes)
    return result


def _outputs(dice: random.Random, nodes: Nodes, in_function: bool) -> str:
    node = dice.choice(nodes)
    index = dice.choice([0, 0, 0, 0, 1, 2, 10**6])
    if in_function:
        return f"{node.name}:{dice.choice(['output', 'y', 'z', 'product', 'value'])}:{index}"
    return f"{node.name}:{index}" if index else node.name


def _in_function(graph_def: Any, nodes: Nodes) -> bool:
    return nodes is not graph_def.node


def remove_node(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    del nodes[dice.randrange(len(nodes))]


def repeat_node(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    node = nodes.add()
    node.CopyFrom(dice.choice(nodes[:-1]) if len(nodes) > 1 else nodes[0])
    if dice.random() < 0.8:
        node.name += "_again"


def move_node(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    node = nodes.add()
    node.CopyFrom(nodes[0])
    del nodes[0]


def rename_node(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    dice.choice(nodes).name = dice.choice([*NAMES, dice.choice(nodes).name])


def change_op(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    dice.choice(nodes).op = dice.choice([*OPS, *[node.op for node in nodes]])


def place_node(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    dice.choice(nodes).device = dice.choice(DEVICES)


def _with_inputs(dice: random.Random, nodes: Nodes) -> Any:
    return dice.choice([node for node in nodes if node.input] or list(nodes))


def read_other(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    node = _with_inputs(dice, nodes)
    if node.input:
        node.input[dice.randrange(len(node.input))] = _outputs(dice, nodes, _in_function(graph_def, nodes))


def read_like(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    """What another node reads, which is more often of a type that fits."""
    node, other = _with_inputs(dice, nodes), _with_inputs(dice, nodes)
    if node.input and other.input:
        node.input[dice.randrange(len(node.input))] = dice.choice(other.input)


def read_same_type(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    """What another node of the same type attribute makes, made before."""
    place = dice.randrange(len(nodes))
    node, kind = nodes[place], nodes[place].attr["T"].type if "T" in nodes[place].attr else 0
    fitting = [other.name for other in nodes[:place] if "T" in other.attr and other.attr["T"].type == kind]
    if node.input and fitting and not _in_function(graph_def, nodes):
        node.input[dice.randrange(len(node.input))] = dice.choice(fitting)


def wait_for_earlier(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    place = dice.randrange(len(nodes))
    if place:
        nodes[place].input.append("^" + dice.choice(nodes[:place]).name)


def read_nothing(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    node = _with_inputs(dice, nodes)
    if node.input:
        place = dice.randrange(len(node.input))
        node.input[place] = dice.choice(["nothing", "", "^", ":0", "x:-1", "^nothing", node.input[place] + ":9"])


def swap_inputs(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    node = _with_inputs(dice, nodes)
    order = list(node.input)
    dice.shuffle(order)
    node.input[:] = order


def drop_input(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    node = _with_inputs(dice, nodes)
    if node.input:
        del node.input[dice.randrange(len(node.input))]


def add_input(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    dice.choice(nodes).input.insert(0, _outputs(dice, nodes, _in_function(graph_def, nodes)))


def wait_for(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    dice.choice(nodes).input.append("^" + dice.choice(nodes).name)


def _value(dice: random.Random) -> Any:
    kind = dice.choice(["i", "f", "b", "s", "type", "shape", "list", "tensor", "func", "placeholder"])
    value = AttrValue()
    if kind == "shape":
        _reshape(dice, value.shape)
    elif kind == "list":
        value.list.i.extend(dice.choices(INTEGERS, k=dice.randrange(4)))
    elif kind == "tensor":
        value.tensor.dtype = dice.choice([1, 3, 7])
        _reshape(dice, value.tensor.tensor_shape)
    elif kind == "func":
        value.func.name = dice.choice(["no_function", "", "Relu"])
    else:
        choices: dict[str, Any] = {"i": INTEGERS, "f": FLOATS, "b": [True, False], "type": TYPES}
        texts = [b"", b"\xff\xfe", b"SAME", b"NHWC", b"x" * 5000]
        chosen = dice.choice(choices.get(kind, texts if kind == "s" else ["T", ""]))
        setattr(value, kind, chosen)
    return value


def _reshape(dice: random.Random, shape: Any) -> None:
    kind = dice.random()
    if kind < 0.15:
        shape.unknown_rank = True
    elif kind < 0.6 and shape.dim:
        dice.choice(shape.dim).size = dice.choice(SIZES)
    elif kind < 0.8 and shape.dim:
        del shape.dim[dice.randrange(len(shape.dim))]
    else:
        shape.dim.add(size=dice.choice(SIZES))


def change_attribute(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    """Another value of the same kind."""
    node = dice.choice([node for node in nodes if node.attr] or list(nodes))
    if not node.attr:
        return
    value = node.attr[dice.choice(sorted(node.attr))]
    kind = value.WhichOneof("value")
    if kind == "i":
        value.i = dice.choice(INTEGERS)
    elif kind == "f":
        value.f = dice.choice(FLOATS)
    elif kind == "b":
        value.b = not value.b
    elif kind == "type":
        value.type = dice.choice(TYPES)
    elif kind == "shape":
        _reshape(dice, value.shape)
    elif kind == "s":
        value.s = dice.choice([b"", b"SAME", b"VALID", b"NCHW", b"\xff", value.s + b"x", value.s[:-1]])
    elif kind == "func":
        names = [function.signature.name for function in graph_def.library.function]
        value.func.name = dice.choice([*names, "no_function", ""])
    elif kind == "tensor":
        change_constant(dice, graph_def, [node])
    elif kind == "list":
        _change_list(dice, value.list)


def _change_list(dice: random.Random, values: Any) -> None:
    for name, choices in (("i", INTEGERS), ("type", TYPES), ("f", FLOATS)):
        items = getattr(values, name)
        if items:
            if dice.random() < 0.5:
                items[dice.randrange(len(items))] = dice.choice(choices)
            else:
                del items[dice.randrange(len(items))]
            return
    if values.shape:
        _reshape(dice, dice.choice(values.shape))
    elif values.s:
        values.s[dice.randrange(len(values.s))] = dice.choice([b"", b"loc:@nothing", b"loc:@\xff"])


def drop_attribute(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    node = dice.choice([node for node in nodes if node.attr] or list(nodes))
    if node.attr:
        del node.attr[dice.choice(sorted(node.attr))]


def replace_attribute(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    """Any value, of any kind."""
    node = dice.choice(nodes)
    name = dice.choice([*sorted(node.attr), *MARKS])
    node.attr[name].CopyFrom(_value(dice))


def borrow_attributes(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    node, other = dice.choice(nodes), dice.choice(nodes)
    for name in other.attr:
        node.attr[name].CopyFrom(other.attr[name])


def change_constant(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    constants = [node for node in nodes if node.op == "Const" and "value" in node.attr]
    if not constants:
        return
    node = dice.choice(constants)
    tensor = node.attr["value"].tensor
    kind = dice.randrange(8)
    if kind == 0:
        _reshape(dice, tensor.tensor_shape)
    elif kind == 1:
        tensor.tensor_content = tensor.tensor_content[: dice.randrange(len(tensor.tensor_content) + 1)]
    elif kind == 2:
        tensor.float_val.extend(dice.choices(FLOATS, k=3))
    elif kind == 3:
        tensor.int_val.extend(dice.choices(INTEGERS[1:-4], k=3))
    elif kind == 4:
        tensor.dtype = dice.choice(TYPES)
    elif kind == 5:
        node.attr["dtype"].type = dice.choice(TYPES)
    elif kind == 6:
        tensor.version_number = dice.choice([1, 7, 2**31 - 1])
    else:
        tensor.ClearField(dice.choice(["float_val", "int_val", "tensor_content", "tensor_shape"]))
        tensor.string_val.append(b"\xff" * dice.choice([0, 3, 1000]))


def change_function(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    """What surrounds the nodes of a function."""
    if not graph_def.library.function:
        return
    place = dice.randrange(len(graph_def.library.function))
    function = graph_def.library.function[place]
    kind = dice.randrange(11)
    if kind == 0:
        del graph_def.library.function[place]
    elif kind == 1:
        graph_def.library.function.add().CopyFrom(function)
    elif kind == 2 and function.ret:
        del function.ret[dice.choice(sorted(function.ret))]
    elif kind == 3 and function.ret:
        function.ret[dice.choice(sorted(function.ret))] = dice.choice(["nothing:z:0", "", ":", "x:y:z", "nothing"])
    elif kind == 4 and function.signature.input_arg:
        del function.signature.input_arg[dice.randrange(len(function.signature.input_arg))]
    elif kind == 5 and function.signature.output_arg:
        del function.signature.output_arg[dice.randrange(len(function.signature.output_arg))]
    elif kind == 6 and function.signature.input_arg:
        dice.choice(function.signature.input_arg).type = dice.choice(TYPES)
    elif kind == 7 and function.node_def:  # it calls itself
        node = dice.choice(function.node_def)
        node.op = dice.choice(["PartitionedCall", "StatefulPartitionedCall", function.signature.name])
        node.attr["f"].func.name = function.signature.name
    elif kind == 8:
        function.signature.name = dice.choice([*NAMES, "Relu"])
    elif kind == 9:
        function.attr[dice.choice(["_noinline", "api_implements", "_XlaMustCompile", "x"])].CopyFrom(_value(dice))
    else:
        function.signature.input_arg.add(name=dice.choice(NAMES), type=dice.choice(TYPES))


def change_versions(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    graph_def.versions.producer = dice.choice([0, 1, 20, 21, 26, 500, 2**31 - 1])
    graph_def.versions.min_consumer = dice.choice([0, 12, 2**31 - 1])


def flip_bytes(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    """In the serialised form of one node; where that is no proto any more, nothing happens."""
    node = dice.choice(nodes)
    data = bytearray(node.SerializeToString())
    for _ in range(dice.choice([1, 1, 2, 5])):
        data[dice.randrange(len(data))] = dice.randrange(256)
    changed = type(node)()
    try:
        changed.ParseFromString(bytes(data))
    except DecodeError:
        return
    node.CopyFrom(changed)


def feed_other_shape(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    placeholders = [node for node in graph_def.node if node.op == "Placeholder"]
    if placeholders:
        _reshape(dice, dice.choice(placeholders).attr["shape"].shape)


def bypass(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    """Each reader of a node reads what the node read."""
    node = _with_inputs(dice, nodes)
    if not node.input or node.input[0].startswith("^"):
        return
    for other in nodes:
        for place, name in enumerate(other.input):
            if name == node.name or name.startswith(f"{node.name}:"):
                other.input[place] = node.input[0]


def wrap(dice: random.Random, graph_def: Any, nodes: Nodes) -> None:
    """Another op behind one of a node's inputs."""
    node = _with_inputs(dice, nodes)
    if not node.input or _in_function(graph_def, nodes) or node.input[0].startswith("^"):
        return
    made = nodes.add(
        name=f"wrapped{len(nodes)}", op=dice.choice(["Identity", "Neg", "Relu", "StopGradient", "Snapshot"])
    )
    made.input.append(node.input[0])
    made.attr["T"].type = tf.float32.as_datatype_enum
    node.input[0] = made.name


MUTATIONS: list[Mutation] = [
    *(remove_node, repeat_node, move_node, rename_node, change_op, place_node, read_other, read_like, read_nothing),
    *(swap_inputs, drop_input, add_input, wait_for, change_attribute, drop_attribute, replace_attribute),
    *(borrow_attributes, change_constant, change_function, change_versions, flip_bytes, feed_other_shape, bypass, wrap),
    *(read_same_type, wait_for_earlier),
]
# More of what TensorFlow often takes, so that much of it comes further than the import.
OFTEN = {read_like: 4, wait_for: 3, change_attribute: 4, change_constant: 4, change_function: 3, bypass: 4, wrap: 4}
OFTEN |= {
    read_same_type: 8,
    wait_for_earlier: 4,
    replace_attribute: 3,
    feed_other_shape: 2,
    swap_inputs: 2,
    repeat_node: 2,
}
WEIGHTS = [OFTEN.get(mutation, 1) for mutation in MUTATIONS]
