"""`tfmem.dynamic` and wrong input: one clear error, and parameters untouched. Sizes at the edge."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from tests.tf.dynamic_nets import TreeLSTM, nodes, random_tree, random_trees
from tfmem import dynamic

INVALID = tf.errors.InvalidArgumentError


@pytest.fixture
def net():
    return TreeLSTM()


def chain(length):
    """Kinds, children and arguments of a tree whose left child is always the next pair."""
    kinds, children, arguments = [0], [], [1, 2]
    top = 0
    for _ in range(length):
        kinds += [0, 1]
        children += [top, len(kinds) - 2]
        arguments += [3, 4, 1]
        top = len(kinds) - 1
    return kinds, children, arguments


def test_an_empty_batch_has_no_losses_and_zero_gradients(net):
    outcome = net.specialize().forward_backward([])
    assert outcome.losses.shape == (0,)
    assert not np.any(outcome.gradients[3])
    assert outcome.gradients[0].indices.shape == (0,)


def test_an_empty_graph_has_loss_0(net):
    handle = net.specialize()
    outcome = handle.forward_backward(handle.batch([([], [], []), ([0], [], [1, 2])]))
    assert outcome.losses[0] == 0
    assert outcome.losses[1] > 0


def test_one_node(net):
    handle = net.specialize()
    losses, gradients = net.gradients([(2, 1)])
    outcome = handle.forward_backward([handle.node("leaf", 1, 2)])
    np.testing.assert_allclose(outcome.losses, losses, rtol=1e-6)
    np.testing.assert_allclose(outcome.gradients[1], gradients[1], rtol=1e-5, atol=1e-7)


def test_a_chain_of_2000_nodes(net):
    handle = net.specialize()
    outcome = handle.forward_backward(handle.batch([chain(2000)]))
    # of a chain the losses of a long one contain those of a short one
    parts = [float(handle.forward_backward(handle.batch([chain(length)])).losses[0]) for length in (100, 101)]
    assert np.isfinite(outcome.losses[0])
    assert outcome.losses[0] > 10 * parts[0]
    assert parts[1] > parts[0]
    assert np.isfinite(outcome.gradients[3]).all()


def test_a_thousand_graphs_at_once(net):
    handle = net.specialize()
    trees = random_trees(1000, most=8)
    outcome = handle.forward_backward([nodes(handle, tree) for tree in trees])
    for number in (0, 499, 999):
        np.testing.assert_allclose(outcome.losses[number], net.loss(trees[number]), rtol=1e-5)


def test_children_may_come_behind_their_parents(net):
    handle = net.specialize()
    ordered = handle.forward_backward(handle.batch([([0, 0, 1], [0, 1], [5, 1, 6, 2, 3])]))
    behind = handle.forward_backward(handle.batch([([1, 0, 0], [1, 2], [3, 5, 1, 6, 2])]))
    np.testing.assert_array_equal(ordered.losses, behind.losses)
    np.testing.assert_array_equal(ordered.gradients[3], behind.gradients[3])


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (([2], [], []), "example 1, node 0: kind 2; expected 0 to 1"),
        (([0], [], [1, 5]), "example 1, node 0: argument 1 of kind 0 is 5; expected 0 to 4"),
        (([0], [], [-1, 0]), "argument 0 of kind 0 is -1; expected 0 to 29"),
        (([0, 1], [0, 2], [1, 1, 1]), "node 1: child 1 is node 2; expected 0 to 1"),
        (([0, 1], [0, 1], [1, 1, 1]), "node 1: it is on a cycle"),
        (([1, 1, 0], [1, 2, 0, 2], [1, 1, 1, 1]), "node 0: it is on a cycle"),
        (([0, 1], [0], [1, 1, 1]), "example 1 has 1 children and 3 arguments"),
        (([0], [], [1]), "example 1 has 0 children and 1 arguments"),
        (([0], [0], [1, 1]), "example 1 has 1 children and 2 arguments"),
    ],
)
def test_a_wrong_graph_is_named_and_writes_nothing(net, example, message):
    handle = net.specialize(optimizer=dynamic.SGD())
    before = [parameter.numpy() for parameter in net.parameters]
    batch = handle.batch([([0], [], [1, 1]), example])
    for call in (handle.forward_backward, handle.step, handle.forward):
        with pytest.raises(INVALID, match=message):
            call(batch)
    for parameter, value in zip(net.parameters, before, strict=True):
        np.testing.assert_array_equal(parameter, value)


def test_a_child_of_another_type_is_named():
    table = tf.Variable(tf.ones([3, 4]))
    wide = dynamic.node(lambda children, word: dynamic.embedding_lookup(table, word))
    narrow = dynamic.node(lambda children: dynamic.reduce_sum(children[0]), children=[(4,)])
    top = dynamic.node(lambda children: dynamic.Result(loss=children[0]), children=[(1,)])
    handle = dynamic.specialize([table], {"wide": wide, "narrow": narrow, "top": top})
    word = handle.node("wide", 1)
    assert float(handle.forward([handle.node("top", handle.node("narrow", word))]).losses[0]) == 4
    with pytest.raises(INVALID, match=r"child 0 has a state of \[4\] numbers; expected \[1\]"):
        handle.forward([handle.node("top", word)])


def test_a_parameter_that_changed_its_shape(net):
    free = tf.Variable(tf.ones([5, 4]), shape=[None, 4])
    with pytest.raises(dynamic.DynamicError, match="expected float32, float64 or bfloat16 of known shape"):
        dynamic.specialize([free], {})
    handle = net.specialize()
    object.__setattr__(handle, "parameters", (*net.parameters[:-1], tf.Variable(tf.ones([9]))))
    with pytest.raises(INVALID, match=r"parameter 6 has shape \[9\]; when the net was specialised, it had \[5\]"):
        handle.forward_backward([handle.node("leaf", 1, 1)])


def test_shapes_are_checked_when_an_expression_is_built():
    matrix, bias = tf.Variable(tf.ones([4, 3]), name="matrix"), tf.Variable(tf.ones([5]), name="bias")
    x = dynamic.vector(bias)
    with pytest.raises(
        dynamic.DynamicError, match=r"a vector of 5 numbers times parameter 'matrix:0' of shape \[4, 3\]"
    ):
        dynamic.matvec(matrix, x)
    with pytest.raises(dynamic.DynamicError, match="add got vectors of 5 and 3 numbers"):
        _ = x + dynamic.matmul(dynamic.split(x, [4, 1])[0], matrix)
    with pytest.raises(dynamic.DynamicError, match="cannot split 5 values into 2 equal parts"):
        dynamic.split(x, 2)
    with pytest.raises(dynamic.DynamicError, match="7 is out of range; expected 0 to 4"):
        dynamic.sparse_softmax_cross_entropy(7, x)


def test_expressions_and_variables_of_another_net(net):
    other = TreeLSTM()
    with pytest.raises(dynamic.DynamicError, match="is none of the 7 parameters"):
        dynamic.specialize(net.parameters, {"leaf": dynamic.node(other.leaf)})
    handle = dynamic.specialize(net.parameters)
    loss = dynamic.reduce_sum(dynamic.embedding_lookup(other.embedding, 1))
    with pytest.raises(dynamic.DynamicError, match="none of the 7 parameters"):
        handle.forward_backward([loss])
    kept = []
    first = dynamic.node(lambda children, word: kept.append(dynamic.embedding_lookup(net.embedding, word)) or kept[0])
    second = dynamic.node(lambda children, word: kept[0] + dynamic.embedding_lookup(net.embedding, word))
    with pytest.raises(dynamic.DynamicError, match="belong to different node kinds"):
        dynamic.specialize(net.parameters, {"first": first, "second": second})


def test_wrong_uses_of_a_handle(net):
    handle = net.specialize()
    with pytest.raises(dynamic.DynamicError, match="there is no kind of node 'triple'"):
        handle.node("triple")
    with pytest.raises(dynamic.DynamicError, match="got 2 values; expected 3: 2 children, then 1"):
        handle.node("pair", handle.node("leaf", 1, 1), 1)
    with pytest.raises(dynamic.DynamicError, match="has no optimizer"):
        handle.step([handle.node("leaf", 1, 1)])
    with pytest.raises(dynamic.DynamicError, match="is listed twice; list each variable once"):
        dynamic.specialize([net.bias, net.bias], {})
    with pytest.raises(dynamic.DynamicError, match="the batch has type int"):
        handle.forward(3)


def test_a_traced_function_with_an_op_that_no_node_has(net):
    kind = dynamic.trace(lambda children, word: tf.math.cumprod(tf.nn.embedding_lookup(net.embedding, word)))
    with pytest.raises(dynamic.DynamicError, match=r"kind 'leaf': op '.*' \(Cumprod\): nodes do not support this op"):
        dynamic.specialize(net.parameters, {"leaf": kind})


def test_a_condition_that_reads_a_parameter_has_no_side_effect(net):
    def pair(children):
        larger = tf.reduce_sum(children[0]) > 0.0
        return tf.cond(larger, lambda: children[0] + net.bias, lambda: children[1])

    with pytest.raises(dynamic.DynamicError, match=r"kind 'pair': op 'cond' \(If\): nodes do not support this op"):
        dynamic.specialize(net.parameters, {"pair": dynamic.trace(pair, children=2)}, state=net.bias.shape[0])


@pytest.mark.parametrize(
    "change",
    [
        ("dynamic 1", "dynamic 2"),
        ("kind 0", "kind 9"),
        ("product", "produce"),
        ("section", "sections"),
        ("put_state -", "put_state k0"),
        ("outer - k", "outer - s"),
    ],
)
def test_a_broken_text_is_an_error(net, change):
    handle = net.specialize()
    text = handle._training.text
    assert change[0] in text
    batch = handle.batch([nodes(handle, random_tree(np.random.default_rng(0), 3))])
    with pytest.raises(INVALID, match=r"kinds of nodes: (expected|line)"):
        run_text(handle, batch, text.replace(*change, 1))


def run_text(handle, batch, text):
    return handle._ops.tfmem_dynamic(
        parameters=[tf.convert_to_tensor(parameter) for parameter in handle.parameters],
        kinds=batch.kinds.values,
        kind_splits=batch.kinds.row_splits,
        children=batch.children.values,
        child_splits=batch.children.row_splits,
        arguments=batch.arguments.values,
        argument_splits=batch.arguments.row_splits,
        seed=tf.constant(0, tf.int64),
        kept=[],
        loss_gradients=[],
        state_gradients=[],
        No=1,
        Ns=0,
        Nd=0,
        Nr=0,
        spec=text,
        mode="forward",
    )


def test_steps_of_threads_that_share_a_handle_are_numbered_one_by_one():
    alone, shared = TreeLSTM(), TreeLSTM()
    handles = [net.specialize(optimizer=dynamic.Adam(0.01)) for net in (alone, shared)]
    batches = [handle.batch([([0, 0, 1], [0, 1], [3, 1, 4, 2, 3])]) for handle in handles]
    for _ in range(40):
        handles[0].step(batches[0])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: handles[1].step(batches[1]), range(40)))
    # every step is the same but for its number, so that only a number that two had could change the sum of them
    for one, other in zip(alone.parameters, shared.parameters, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_step_that_failed_does_not_count():
    clean, disturbed = TreeLSTM(), TreeLSTM()
    for net in (clean, disturbed):
        handle = net.specialize(optimizer=dynamic.Adam(0.01))
        for _ in range(3):
            if net is disturbed:
                with pytest.raises(INVALID):
                    handle.step(handle.batch([([9], [], [])]))
            handle.step(handle.batch([([0], [], [1, 2])]))
    np.testing.assert_array_equal(clean.output_kernel, disturbed.output_kernel)


def test_a_recorded_cycle_is_an_error(net):
    handle = net.specialize()
    children = []
    top = dynamic.Node(1, children, (0,))
    children += [handle.node("leaf", 1, 1), top]
    with pytest.raises(dynamic.DynamicError, match="a node of kind 1 depends on itself"):
        handle.batch([top])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_and_an_example_without_nodes(compiled):
    def kinds(weights):
        return {"leaf": dynamic.node(lambda children, row: dynamic.embedding_lookup(weights["table"], row))}

    layer = dynamic.Layer({"table": (5, 4)}, kinds, state=4)
    call = tf.function(layer) if compiled else layer
    for empty in (0, 1):
        examples = [([0], [], [1])]
        examples.insert(empty, ([], [], []))
        with pytest.raises(INVALID, match="an example has no nodes"):
            call(tuple(layer.handle.batch(examples)))
    assert call(tuple(layer.handle.batch(examples[:1]))).shape == (1, 4)
