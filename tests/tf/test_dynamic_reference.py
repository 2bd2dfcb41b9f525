"""The op against its definition in NumPy, on random graphs; and text and batches that were damaged."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from custom_ops.load import load
from tests import dynamic_reference as reference
from tests.tf.dynamic_nets import TreeLSTM
from tests.tf.test_dynamic_faults import run_text
from tests.tiers import examples
from tfmem import dynamic

NET = TreeLSTM()
DROPPED = 0.25


def specialized(**options) -> dynamic.Handle:
    """Its pairs drop what is left of them by a mask."""

    def pair(children, label):
        found = NET.pair(children, label)
        h, c = found.state
        return dynamic.Result((dynamic.dropout(h, DROPPED), c), found.loss, found.outputs)

    kinds = {"leaf": dynamic.node(NET.leaf), "pair": dynamic.node(pair, children=2)}
    return dynamic.specialize(NET.parameters, kinds, state=(NET.hidden, NET.hidden), **options)


@st.composite
def graphs(draw):
    """Graphs without cycles whose nodes may have several parents, or none, in any order."""
    count = draw(st.integers(1, 8))
    places = draw(st.permutations(range(count)))
    nodes = []
    for number in range(count):
        label = draw(st.integers(0, NET.classes - 1))
        if number == 0 or draw(st.booleans()):
            nodes.append((0, [], [draw(st.integers(0, NET.words - 1)), label]))
        else:
            below = [places[draw(st.integers(0, number - 1))] for _ in range(2)]
            nodes.append((1, below, [label]))
    ordered = [nodes[places.index(place)] for place in range(count)]
    return (
        [kind for kind, _, _ in ordered],
        [child for _, children, _ in ordered for child in children],
        [argument for _, _, arguments in ordered for argument in arguments],
    )


def defined(handle, examples, seed, dtype=np.float64):
    spec = handle._training
    values = [parameter.numpy().astype(dtype) for parameter in NET.parameters]
    return reference.Run(spec.parameters, spec.kinds, values, examples, seed)


HANDLE = specialized()


@settings(max_examples=examples(60))
@given(st.lists(graphs(), min_size=1, max_size=4), st.integers(0, 1 << 40))
def test_the_op_is_its_definition_on_random_graphs(examples, seed):
    run = defined(HANDLE, examples, seed)
    weights = np.linspace(0.5, 2, len(examples))
    outcome = HANDLE.forward_backward(HANDLE.batch(examples), seed=seed, loss_weights=tf.constant(weights, tf.float32))
    np.testing.assert_allclose(outcome.losses, run.losses, rtol=1e-5)
    np.testing.assert_allclose(outcome.outputs[0], [node.outputs[0] for node in run.nodes], rtol=1e-4, atol=1e-5)
    for gradient, expected in zip(outcome.gradients, run.backward(weights), strict=True):
        np.testing.assert_allclose(tf.convert_to_tensor(gradient), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=examples(10))
@given(graphs(), st.integers(0, 1 << 40), st.randoms(use_true_random=False))
def test_the_definition_has_the_gradient_of_its_loss(example, seed, random):
    spec = HANDLE._training
    values = [parameter.numpy().astype(np.float64) for parameter in NET.parameters]
    run = reference.Run(spec.parameters, spec.kinds, values, [example], seed)
    for value, gradient in zip(values, run.backward(), strict=True):
        at = tuple(random.randrange(size) for size in value.shape)
        kept, ends = value[at], []
        for change in (1e-6, -1e-6):
            value[at] = kept + change
            ends.append(reference.Run(spec.parameters, spec.kinds, values, [example], seed).losses[0])
        value[at] = kept
        np.testing.assert_allclose((ends[0] - ends[1]) / 2e-6, gradient[at], rtol=1e-4, atol=1e-7)


@pytest.fixture(params=[16, 32, 64])
def vector_bytes(request):
    load().limit_vector_bytes(request.param)
    yield request.param
    load().limit_vector_bytes(64)


@pytest.mark.usefixtures("vector_bytes")
@pytest.mark.parametrize("count", [1, 3, 20])
def test_products_of_few_nodes_are_dealt_to_processors(count):
    """From 5 us on, which these take, up to 16 rows."""
    net = TreeLSTM(hidden=150)
    handle = net.specialize()
    examples = [([0, 0, 1, 0, 1], [0, 1, 2, 3], [number % net.words, 0, 1, 2, 3, 1, 4, 2]) for number in range(count)]
    spec, values = handle._training, [parameter.numpy().astype(np.float64) for parameter in net.parameters]
    run = reference.Run(spec.parameters, spec.kinds, values, examples)
    first, *others = (handle.forward_backward(handle.batch(examples)) for _ in range(8))
    np.testing.assert_allclose(first.losses, run.losses, rtol=1e-5)
    for gradient, expected in zip(first.gradients, run.backward(), strict=True):
        np.testing.assert_allclose(tf.convert_to_tensor(gradient), expected, rtol=1e-4, atol=1e-5)
    for other in others:
        for one, another in zip(first.gradients, other.gradients, strict=True):
            np.testing.assert_array_equal(tf.convert_to_tensor(one), tf.convert_to_tensor(another))


@pytest.mark.usefixtures("vector_bytes")
@pytest.mark.parametrize(
    "optimizer", [dynamic.SGD(0.1), dynamic.SGD(0.1, 0.9), dynamic.Adam(0.01)], ids=["sgd", "momentum", "adam"]
)
def test_updates_are_their_definition(optimizer):
    net = TreeLSTM(words=1)  # whose only row is looked up in each step: nothing is lazy
    handle = net.specialize(optimizer=optimizer)
    values = [parameter.numpy().astype(np.float64) for parameter in net.parameters]
    slots = [tuple(np.zeros_like(value) for _ in optimizer.slots) for value in values]
    spec, example = handle._training, ([0, 0, 1], [0, 1], [0, 1, 0, 2, 3])
    for step in range(1, 6):
        run = reference.Run(spec.parameters, spec.kinds, values, [example])
        rates = [float(rate) for rate in optimizer.rates(tf.constant(step))[:4]]
        updated = [
            reference.update(optimizer.rule, rates, step, *of) for of in zip(values, slots, run.backward(), strict=True)
        ]
        values, slots = [value for value, _ in updated], [slot for _, slot in updated]
        np.testing.assert_allclose(handle.step(handle.batch([example])).losses, run.losses, rtol=1e-4)
    for parameter, value in zip(net.parameters, values, strict=True):
        np.testing.assert_allclose(parameter, value, rtol=1e-4, atol=1e-5)


def test_damaged_texts_and_batches_are_errors_or_run():
    random = np.random.default_rng(5)
    handle = NET.specialize()
    text, example = handle.text, ([0, 0, 1], [0, 1], [3, 1, 4, 2, 3])
    refused = 0
    for _ in range(400):
        lines = text.splitlines()
        number = int(random.integers(len(lines)))
        words = lines[number].split()
        match random.integers(4):
            case 0:
                words[random.integers(len(words))] = str(random.choice(["-1", "0", "1", "7", "k3", "s9", "c1", "nan"]))
            case 1:
                words[random.integers(len(words))] = str(random.choice(text.split()))
            case 2:
                del words[random.integers(len(words))]
            case _:
                words.append(str(random.choice(text.split())))
        lines[number] = " ".join(words)
        lists = [list(values) for values in example]
        damaged = lists[random.integers(3)]
        damaged[random.integers(len(damaged))] = int(random.choice([-(1 << 31), -1, 0, 1, 2, 5, 30, (1 << 31) - 1]))
        for given_text, given_lists in (("\n".join(lines) + "\n", example), (text, lists)):
            try:
                run_text(handle, handle.batch([given_lists]), given_text)
            except (tf.errors.InvalidArgumentError, tf.errors.ResourceExhaustedError):
                refused += 1
    assert 100 < refused < 800
