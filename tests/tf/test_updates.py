"""Which of TensorFlow's ops write variables."""

from __future__ import annotations

from tensorflow.core.framework.op_def_pb2 import OpList
from tensorflow.core.framework.types_pb2 import DT_RESOURCE
from tensorflow.python.client import pywrap_tf_session as session

from graph_passes.graph.ops import is_update

HANDLES = ("resource", "ref", "var")  # how TensorFlow names the handle of a variable
OTHERS = {
    "AssignVariableXlaConcatND",  # XLA's, of a sharded variable
    "DestroyResourceOp",
    "DisableCopyOnRead",
    "ResourceCreateOp",
    "ResourceUsingOp",
    "RngSkip",  # a state of random numbers
}


def test_every_op_that_writes_through_a_handle_and_returns_nothing_is_an_update() -> None:
    registered = OpList.FromString(session.TF_GetBuffer(session.TF_GetAllOpList()))
    writers = {
        op.name
        for op in registered.op
        if op.is_stateful
        and op.input_arg
        and not op.output_arg
        and op.input_arg[0].type == DT_RESOURCE
        and op.input_arg[0].name in HANDLES
    }
    assert {"ResourceScatterSub", "ResourceApplyAdam", "AssignVariableOp"} <= writers
    assert {name for name in writers if not is_update(name)} - OTHERS == set()
