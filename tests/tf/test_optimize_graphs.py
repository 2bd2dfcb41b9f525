"""`tfmem.optimize` of graphs of all kinds: equal to the bit, and what cannot be moved is left alone."""

import pytest
import tensorflow as tf

import tfmem
from tests.tf.optimized_runs import SPARE, run


def layers(count=5, channels=(2, 8)):
    first, wide = channels
    return [
        tf.Variable(tf.random.stateless_normal([3, 3, wide if place else first, wide], [place, 1], stddev=0.15))
        for place in range(count)
    ]


def convolve(x, weights):
    return tf.nn.relu(tf.nn.conv2d(x, weights, 1, "SAME"))


def descend(variables, gradients):
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.assign_sub(0.05 * gradient)


def with_tf_gradients():
    weights = layers()

    def step(x, y):
        for each in weights:
            x = convolve(x, each)
        loss = tf.reduce_mean(x * x)
        descend(weights, tf.gradients(loss, weights))
        return loss

    return step


def skip_connections():
    weights = layers()

    def step(x, y):
        with tf.GradientTape() as tape:
            outputs = [convolve(x, weights[0])]
            for each in weights[1:]:
                outputs.append(convolve(outputs[-1], each) + outputs[-1])
            loss = tf.reduce_mean(tf.concat([outputs[-1] + outputs[0], outputs[1]], -1) ** 2)
        descend(weights, tape.gradient(loss, weights))
        return loss

    return step


def shared_layers_and_clipping():
    weights = layers(2)

    def step(x, y):
        with tf.GradientTape() as tape:
            x = convolve(x, weights[0])
            for _ in range(5):
                x = convolve(x, weights[1])
            loss = tf.reduce_mean(x * x)
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, weights), 0.1)
        descend(weights, gradients)
        return loss, norm

    return step


def misleading_scopes_and_custom_gradients():
    weights = layers()

    @tf.custom_gradient
    def swish(x):
        gate = tf.sigmoid(x)
        return x * gate, lambda upstream: upstream * (gate * (1 + x * (1 - gate)))

    def step(x, y):
        with tf.name_scope("gradients"), tf.GradientTape() as tape:
            for each in weights:
                with tf.name_scope("backward"):
                    x = swish(tf.nn.conv2d(x, each, 1, "SAME"))
            loss = tf.reduce_mean(x * x)
        with tf.name_scope("forward"):
            descend(weights, tape.gradient(loss, weights))
        return loss

    return step


def several_losses():
    weights = layers()

    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            losses = []
            for each in weights:
                x = convolve(x, each)
                losses.append(tf.reduce_mean(x * x))
            early, late = losses[2], losses[-1] + 0.1 * losses[0]
        descend(weights, tape.gradient(late, weights))
        descend(weights[:3], tape.gradient(early, weights[:3]))
        return early, late

    return step


def gradients_of_gradients():
    weights = layers(4)

    def step(x, y):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                h = x
                for each in weights:
                    h = tf.nn.softplus(tf.nn.conv2d(h, each, 1, "SAME"))
                loss = tf.reduce_mean(h * h)
            slope = tf.norm(tf.reshape(inner.gradient(loss, x), [16, -1]), axis=1)
            penalised = loss + tf.reduce_mean((slope - 1.0) ** 2)
        descend(weights, outer.gradient(penalised, weights))
        return penalised

    return step


STEPS = [
    with_tf_gradients,
    skip_connections,
    shared_layers_and_clipping,
    misleading_scopes_and_custom_gradients,
    several_losses,
    gradients_of_gradients,
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make_step", STEPS, ids=lambda make: make.__name__)
def test_roles_are_read_from_the_structure(make_step, batch, flow, smallest):
    expected = run(tf.function(make_step()), batch)
    offload = tfmem.OffloadOptions(reuse_distance=1)
    least = smallest(lambda size: tfmem.optimize(tf.function(make_step()), memory_budget=size, offload=offload)(*batch))
    function = tfmem.optimize(tf.function(make_step()), memory_budget=least + SPARE, offload=offload)
    assert run(function, batch) == expected
    assert flow.moved > 0


def python_op(x, y):
    result = tf.py_function(lambda tensor: 2.0 * tensor, [x], tf.float32)
    result.set_shape(x.shape)
    return result


def while_loop(x, y):
    return tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h)), [0, x])[1]


def condition(x, y):
    return tf.cond(tf.reduce_sum(y) > 0, lambda: tf.sin(x), lambda: tf.cos(x))


def boolean_mask(x, y):
    return x + tf.reduce_mean(tf.boolean_mask(x, y < 3))


def strings(x, y):
    with tf.control_dependencies([tf.debugging.assert_equal(tf.strings.length(tf.strings.as_string(y)), 1)]):
        return tf.identity(x)


def integers(x, y):
    return x * tf.cast(tf.cast(tf.round(x), tf.int32), tf.float32)


UNUSUAL = {
    python_op: None,
    while_loop: None,
    condition: None,
    boolean_mask: ("boolean_mask/GatherV2:0", "its size is not known before it runs"),
    strings: None,
    integers: ("Cast:0", "TensorFlow keeps int32 tensors in host memory"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("middle", UNUSUAL, ids=lambda middle: middle.__name__)
def test_what_cannot_be_moved_is_left_alone(middle, batch, flow, smallest):
    def make_step():
        weights = layers()

        def step(x, y):
            with tf.GradientTape() as tape:
                for place, each in enumerate(weights):
                    x = convolve(x, each)
                    if place == 2:
                        x = middle(x, y)
                loss = tf.reduce_mean(x * x)
            descend(weights, tape.gradient(loss, weights))
            return loss

        return tf.function(step)

    expected = run(make_step(), batch)
    budget = SPARE + smallest(lambda size: tfmem.optimize(make_step(), memory_budget=size)(*batch))
    function = tfmem.optimize(make_step(), memory_budget=budget)
    assert run(function, batch) == expected
    assert flow.moved > 0
    assert UNUSUAL[middle] in (None, *tfmem.report(function).not_moved)


def test_lookup_tables_are_left_alone(new_net, batch, flow, smallest):
    keys = tf.range(5, dtype=tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, (keys + 2) % 5), 0)

    def plain():
        net = new_net()
        return tf.function(lambda x, y: net.step(x, table.lookup(y)))

    def within(budget):
        return tfmem.optimize(plain(), memory_budget=budget)

    expected = run(plain(), batch)
    assert run(within(SPARE + smallest(lambda size: within(size)(*batch))), batch) == expected
    assert flow.moved > 0
