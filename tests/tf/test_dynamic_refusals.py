"""What would be silently wrong is refused, and what is not trained stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.errors import GradientError
from tests.tf.dynamic_nets import TreeLSTM, nodes, random_trees
from tfmem import dynamic
from tfmem.api import load_ops
from tfmem.dynamic.parts import apply, in_halves


@pytest.fixture(scope="module")
def net() -> TreeLSTM:
    return TreeLSTM()


@pytest.fixture(scope="module")
def handle(net: TreeLSTM) -> dynamic.Handle:
    return net.specialize()


def trees_of(handle: dynamic.Handle, count: int = 4, seed: int = 0) -> list[dynamic.Node]:
    return [nodes(handle, tree) for tree in random_trees(count, seed=seed)]


# ---- gradients of outputs ----


@pytest.mark.parametrize("in_function", [False, True])
def test_outputs_have_no_gradient_and_say_so(net: TreeLSTM, handle: dynamic.Handle, in_function: bool) -> None:
    batch = handle.batch(trees_of(handle))

    def gradients(of_outputs: float) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            outcome = handle.forward(batch, training=True)
            loss = tf.reduce_sum(outcome.losses)
            if of_outputs:
                loss += of_outputs * tf.reduce_sum(outcome.outputs[0] ** 2)
        return tape.gradient(loss, net.parameters)

    run = tf.function(gradients, autograph=False) if in_function else gradients
    assert all(np.abs(tf.convert_to_tensor(gradient)).max() > 0 for gradient in run(0.0))
    with pytest.raises(GradientError, match=r"outputs of a dynamic net have no gradient.*state"):
        run(0.5)


def test_outputs_may_be_looked_at_under_a_tape(net: TreeLSTM, handle: dynamic.Handle) -> None:
    batch = handle.batch(trees_of(handle))
    with tf.GradientTape() as tape:
        outcome = handle.forward(batch, training=True)
        right = tf.reduce_mean(tf.cast(tf.argmax(outcome.outputs[0], 1) == 0, tf.float32))
        loss = tf.reduce_sum(outcome.losses) + tf.reduce_sum(tf.stop_gradient(outcome.outputs[0])) + right
    assert all(gradient is not None for gradient in tape.gradient(loss, net.parameters))


# ---- parameters that are not trained ----


OPTIMIZERS = [dynamic.SGD(0.1), dynamic.SGD(0.1, 0.9), dynamic.Adam(0.01)]


class Frozen(TreeLSTM):
    """A layer of which the named parameters are not trained."""

    def freeze(self, *names: str) -> Frozen:
        for name in names:
            setattr(self, name, tf.Variable(getattr(self, name), trainable=False, name=name))
        return self


@pytest.mark.parametrize("frozen", [["embedding"], ["kernel", "leaf_bias"], ["output_kernel", "embedding", "bias"]])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_a_step_leaves_what_is_not_trained(optimizer: Any, frozen: list[str]) -> None:
    net, plain = Frozen().freeze(*frozen), TreeLSTM()
    handle, whole = net.specialize(optimizer=optimizer), plain.specialize()
    before = {name: getattr(net, name).numpy() for name in frozen}
    others = [number for number, one in enumerate(net.parameters) if one.trainable]
    # As if the gradients of all were there, and only those of the others applied.
    slots = [[tf.Variable(tf.zeros_like(plain.parameters[n])) for n in others] for _ in optimizer.slots]
    for step in range(3):
        trees = random_trees(5, seed=step)
        losses = handle.step([nodes(handle, tree) for tree in trees]).losses
        outcome = whole.forward_backward([nodes(whole, tree) for tree in trees])
        assert losses.numpy().tobytes() == outcome.losses.numpy().tobytes() or step > 0
        apply(
            optimizer,
            tf.constant(step + 1, tf.int64),
            [plain.parameters[n] for n in others],
            [slot for of_rule in slots for slot in of_rule],
            [outcome.gradients[n] for n in others],
        )
    for name, value in before.items():
        assert getattr(net, name).numpy().tobytes() == value.tobytes()
    for number in others:
        found, expected = net.parameters[number].numpy(), plain.parameters[number].numpy()
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    assert not np.array_equal(net.parameters[others[0]], TreeLSTM().parameters[others[0]])


def test_gradients_of_what_is_not_trained_are_there_for_who_asks() -> None:
    net, plain = Frozen().freeze("embedding", "kernel"), TreeLSTM()
    handle, other = net.specialize(optimizer=dynamic.SGD()), plain.specialize()
    found = handle.forward_backward(trees_of(handle)).gradients
    for ours, theirs in zip(found, other.forward_backward(trees_of(other)).gradients, strict=True):
        np.testing.assert_array_equal(tf.convert_to_tensor(ours), tf.convert_to_tensor(theirs))


def test_a_step_in_halves_leaves_it_too() -> None:
    net = Frozen().freeze("embedding", "kernel")
    handle = net.specialize(optimizer=dynamic.Adam())
    before = net.embedding.numpy(), net.kernel.numpy(), net.bias.numpy()
    handle._step_of_gradients(in_halves, handle.batch(trees_of(handle)), None, None)
    assert np.array_equal(net.embedding, before[0])
    assert np.array_equal(net.kernel, before[1])
    assert not np.array_equal(net.bias, before[2])


def test_a_restored_moment_moves_nothing_that_is_not_trained() -> None:
    net = Frozen().freeze("kernel", "embedding")
    handle = net.specialize(optimizer=dynamic.SGD(0.1, 0.9))
    for slot in handle.slots.momentum:
        slot.assign(tf.ones_like(slot))
    before = net.kernel.numpy(), net.embedding.numpy()
    handle.step(trees_of(handle))
    assert np.array_equal(net.kernel, before[0])
    assert np.array_equal(net.embedding, before[1])


# ---- integers ----


def test_a_recorded_integer_is_one_by_its_type(net: TreeLSTM) -> None:
    for wrong in (2.7, 2.0, np.float32(2), "2", tf.constant(2.0), None, [2]):
        for _ in range(2):  # the second time by the extension
            with pytest.raises(dynamic.DynamicError, match=r"lookup: .* is no integer"):
                dynamic.embedding_lookup(net.embedding, wrong)
    for right in (2, np.int8(2), np.uint64(2), tf.constant(2), True):
        assert dynamic.embedding_lookup(net.embedding, right).integers == (int(right),)
    logits = dynamic.vector(net.output_bias)
    with pytest.raises(dynamic.DynamicError, match=r"cross_entropy: 1\.9 is no integer"):
        dynamic.sparse_softmax_cross_entropy(1.9, logits)
    for parts in ([1.5, 3.5], 5.0, [1.0, 4.0]):
        with pytest.raises(dynamic.DynamicError, match=r"cannot split .* expected integers"):
            dynamic.split(logits, parts)


LEAF = ([0], [], [4, 1])


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("wrong", [1.5, 1.0, np.float64(1), 2**31, np.int64(2**32), np.uint64(2**63 + 1)])
def test_lists_of_a_batch_are_integers(handle: dynamic.Handle, place: int, wrong: Any) -> None:
    example = [list(column) for column in LEAF]
    example[place] = [wrong] * max(1, len(example[place]))
    with pytest.raises(dynamic.DynamicError, match="integer"):
        handle.batch([tuple(example)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["dense", "ragged", "numpy"])
@pytest.mark.parametrize("in_function", [False, True])
def test_tensors_of_a_batch_are_integers(handle: dynamic.Handle, form: str, in_function: bool) -> None:
    def losses(dtype: Any, word: float) -> tf.Tensor:
        columns = [np.array([row], np.dtype(dtype)) for row in ([0], [], [word, 1])]
        if form == "dense":
            columns = [tf.constant(column) for column in columns]
        if form == "ragged":
            columns = [tf.RaggedTensor.from_tensor(tf.constant(column)) for column in columns]

        def run(*given: Any) -> tf.Tensor:
            return handle.forward(given).losses

        return (tf.function(run) if in_function else run)(*columns)

    expected = losses("int32", 4).numpy()
    for right in ("int8", "uint8", "int16", "uint16", "int64", "uint32", "uint64"):
        np.testing.assert_array_equal(losses(right, 4), expected)
    for wrong in ("float32", "float64", "bool"):
        with pytest.raises(dynamic.DynamicError, match=f"of type {wrong} in a batch; expected integers"):
            losses(wrong, 4)
    # 4 + 2 ** 32 is 4 in its last 32 bits.
    for wide, word in (("int64", 2**32 + 4), ("int64", -(2**32) + 4), ("uint64", 2**63 + 4), ("uint32", 2**32 - 1)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="argument 0 of kind 0 is"):
            losses(wide, word)


@pytest.mark.parametrize("seed", [1.5, 2.0, "3", True, tf.constant(1.0)], ids=str)
def test_a_seed_is_an_integer(seed: Any) -> None:
    handle = TreeLSTM().specialize(optimizer=dynamic.SGD())
    batch = handle.batch(trees_of(handle, 1))
    for run in (handle.step, handle.forward, handle.forward_backward):
        with pytest.raises(dynamic.DynamicError, match=r"seed .* expected an integer"):
            run(batch, seed=seed)
    for right in (2**40, np.int64(3), tf.constant(3), tf.constant(3, tf.int64)):
        handle.step(batch, seed=right)
        handle.forward(batch, seed=right)


# ---- nodes of another handle ----


def test_nodes_of_another_handle_are_refused(net: TreeLSTM, handle: dynamic.Handle) -> None:
    mine, alike = handle.node("leaf", 4, 1), TreeLSTM(seed=3).specialize().node("leaf", 4, 1)
    assert handle.batch([alike]).arguments.to_list() == [[4, 1]]  # the same numbers mean the same
    parameters, kinds = net.parameters, {"pair": dynamic.node(net.pair, children=2), "leaf": dynamic.node(net.leaf)}
    turned = dynamic.specialize(parameters, kinds, state=(net.hidden, net.hidden))
    with pytest.raises(dynamic.DynamicError, match="node of kind 1 was made by another handle"):
        handle.batch([turned.node("leaf", 4, 1)])
    leaf = TreeLSTM(words=31).specialize().node("leaf", 4, 1)
    for example in (leaf, [leaf], handle.node("pair", mine, leaf, 1), [mine, leaf]):
        for batch in ([example], [mine, example], [LEAF, example]):
            with pytest.raises(dynamic.DynamicError, match="node of kind 0 was made by another handle"):
                handle.batch(batch)
    assert handle.batch([mine, handle.node("pair", mine, mine, 1)]).kinds.to_list() == [[0], [0, 1]]


def test_nodes_may_be_copied_and_written_as_they_are(handle: dynamic.Handle) -> None:
    import copy
    import pickle

    mine = handle.node("pair", handle.node("leaf", 4, 1), dynamic.Node(0, (), (4, 1)), 1)
    assert mine == (1, ((0, (), (4, 1)), (0, (), (4, 1))), (1,))
    for same in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert same == mine
        assert handle.batch([same]).arguments.to_list() == handle.batch([mine]).arguments.to_list()


# ---- a variable under two names ----


@pytest.mark.parametrize(("rule", "places"), [("adam", (1, 2)), ("adam", (0, 1)), ("momentum", (0, 1))])
def test_a_variable_that_a_step_would_write_twice_is_refused(rule: str, places: tuple[int, int]) -> None:
    parameter = tf.Variable(tf.ones([3]), name="v")

    def loss(children: Any) -> dynamic.Result:
        return dynamic.Result(loss=dynamic.reduce_sum(dynamic.vector(parameter)))

    optimizer = dynamic.Adam() if rule == "adam" else dynamic.SGD(0.1, 0.5)
    handle = dynamic.specialize([parameter], {"node": dynamic.node(loss)}, state=(), optimizer=optimizer)
    variables = [parameter, *(tf.Variable(tf.zeros([3])) for _ in optimizer.slots)]
    variables[places[1]] = variables[places[0]]
    batch = handle.batch([handle.node("node")])
    held = parameter.read_value()  # so that the step has to copy
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"variables\[{places[0]}\] and variables\[{places[1]}\]"):
        load_ops().ops.tfmem_dynamic_step(
            variables=[variable.handle for variable in variables],
            kinds=batch.kinds.values,
            kind_splits=batch.kinds.row_splits,
            children=batch.children.values,
            child_splits=batch.children.row_splits,
            arguments=batch.arguments.values,
            argument_splits=batch.arguments.row_splits,
            seed=tf.constant(0, tf.int64),
            loss_gradients=[],
            rates=optimizer.rates(tf.constant(1)),
            number=tf.constant(1, tf.int64),
            No=0,
            spec=handle.text,
            N=1,
            rule=rule,
        )
    np.testing.assert_array_equal(held, parameter)
