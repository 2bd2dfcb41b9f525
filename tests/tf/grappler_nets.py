"""Training steps, run by TensorFlow and by tfmem: which ops ran, and what came out; see test_grappler.py.

    python -m tests.tf.grappler_nets NAME ...

prints a JSON object. On its own, because it is the process that has oneDNN or not, and most plain steps do not repeat
themselves with it.
"""

import json
import re
import sys
from collections import Counter
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow.python.eager import context

import tfmem
from graph_passes.passes.equal import plan as equal

STEPS = 5
# What passes arguments, moves tensors, or is made of control flow when it is lowered: it computes nothing.
NO_COMPUTING = {"_Arg", "_Retval", "Placeholder", "Const", "NoOp", "Identity", "IdentityN"}
NO_COMPUTING |= {"Switch", "Merge", "Enter", "Exit", "NextIteration", "LoopCond"}

classify = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
judge = keras.losses.BinaryCrossentropy(from_logits=True)


def trained(model, optimizer, *batch):
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = classify(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step, batch


def residual():
    x = image = keras.Input((32, 32, 3))
    for width in (8, 16):
        shortcut = layers.Conv2D(width, 1)(x)
        x = layers.Conv2D(width, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(x))
        x = layers.ReLU()(layers.Add()([x, shortcut]))
    logits = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
    images = np.random.default_rng(0).normal(size=(32, 32, 32, 3)).astype("float32")
    return trained(keras.Model(image, logits), keras.optimizers.SGD(0.1, momentum=0.9), images, np.arange(32) % 10)


def pooled():
    """With max pooling of what is mostly equal: whom the gradient goes to is the kernel's choice."""
    x = image = keras.Input((64, 64, 3))
    x = layers.MaxPooling2D(3, 2)(layers.Conv2D(16, 3, activation="relu")(x))
    for _ in range(6):
        x = layers.Conv2D(32, 3, padding="same", activation="relu")(x)
    logits = layers.Dense(10)(layers.GlobalAveragePooling2D()(layers.MaxPooling2D(3, 2)(x)))
    images = np.random.default_rng(0).normal(size=(32, 64, 64, 3)).astype("float32")
    return trained(keras.Model(image, logits), keras.optimizers.SGD(0.1), images, np.arange(32) % 10)


def transformer():
    words = keras.Input((64,), dtype="int32")
    x = layers.Embedding(100, 64)(words)
    attended = layers.Dropout(0.1, seed=3)(layers.MultiHeadAttention(4, 16)(x, x))
    x = layers.LayerNormalization()(layers.Add()([x, attended]))
    wide = layers.Dense(64)(layers.Dense(256, activation="gelu")(x))
    x = layers.LayerNormalization()(layers.Add()([x, wide]))
    logits = layers.Dense(10)(layers.GlobalAveragePooling1D()(x))
    texts = np.random.default_rng(0).integers(0, 100, size=(32, 64)).astype("int32")
    return trained(keras.Model(words, logits), keras.optimizers.Adam(1e-3), texts, np.arange(32) % 10)


def lstm():
    x = sequence = keras.Input((24, 32))
    for _ in range(4):
        x = layers.Dense(256, activation="tanh")(x)
    x = layers.GRU(32, reset_after=False)(layers.LSTM(32, return_sequences=True)(x))
    sequences = np.random.default_rng(0).normal(size=(64, 24, 32)).astype("float32")
    model = keras.Model(sequence, layers.Dense(10)(x))
    return trained(model, keras.optimizers.SGD(0.1), sequences, np.arange(64) % 10)


def gan():
    up = {"strides": 2, "padding": "same"}
    maker = keras.Sequential([keras.Input((16,)), layers.Dense(8 * 8 * 16), layers.LeakyReLU()])
    maker.add(layers.Reshape((8, 8, 16)))
    maker.add(layers.Conv2DTranspose(16, 4, **up))
    maker.add(layers.LeakyReLU())
    maker.add(layers.Conv2DTranspose(1, 4, activation="tanh", **up))
    critic = keras.Sequential([keras.Input((32, 32, 1)), layers.Conv2D(16, 4, **up), layers.LeakyReLU()])
    critic.add(layers.Conv2D(32, 4, **up))
    critic.add(layers.LeakyReLU())
    critic.add(layers.Flatten())
    critic.add(layers.Dense(1))
    optimizers = keras.optimizers.Adam(1e-4), keras.optimizers.Adam(1e-4)
    for optimizer, model in zip(optimizers, (maker, critic), strict=True):
        optimizer.build(model.trainable_variables)

    def step(noise, images):
        with tf.GradientTape(persistent=True) as tape:
            made = maker(noise, training=True)
            real, fake = critic(images, training=True), critic(made, training=True)
            losses = (
                judge(tf.ones_like(fake), fake),
                judge(tf.ones_like(real), real) + judge(tf.zeros_like(fake), fake),
            )
        for optimizer, model, loss in zip(optimizers, (maker, critic), losses, strict=True):
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return losses

    random = np.random.default_rng(0)
    return step, (random.normal(size=(64, 16)).astype("f"), random.normal(size=(64, 32, 32, 1)).astype("f"))


def averaged():
    """`accumulated`, with sums of three; in which order TensorFlow adds these depends on what it can write over."""
    return accumulated(lambda other, variable, total: (other + variable + total) / 3.0)


def accumulated(mean=lambda other, variable, total: (other + variable) / 2.0):
    """A condition applies the gradients of two steps, with decay, and takes the mean of weights."""
    image = keras.Input((16, 16, 3))
    x = layers.Conv2D(32, 3, padding="same", activation="relu")(image)
    x = layers.Conv2D(32, 3, padding="same", activation="tanh")(x)
    model = keras.Model(image, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    variables = model.trainable_variables
    sums, slow = [[tf.Variable(start(each)) for each in variables] for start in (tf.zeros_like, tf.identity)]
    count = tf.Variable(0)

    def update(losses):
        for variable, total, other in zip(variables, sums, slow, strict=True):
            gradient = total / 2.0 / losses
            variable.assign_sub(0.05 * (gradient + 1e-3 * variable + 1e-4 * other))
            other.assign(mean(other, variable, total))
            total.assign(tf.zeros_like(total))
        return True

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = classify(y, model(x, training=True))
        for total, gradient in zip(sums, tape.gradient(loss, variables), strict=True):
            total.assign_add(gradient)
        tf.cond(count.assign_add(1) % 2 == 0, lambda: update(3.0), lambda: False)
        return loss, *map(tf.reduce_sum, (*variables, *slow))

    images = np.random.default_rng(0).normal(size=(32, 16, 16, 3)).astype("float32")
    return step, (images, np.arange(32) % 10)


NETS = {
    "residual": residual,
    "pooled": pooled,
    "transformer": transformer,
    "lstm": lstm,
    "gan": gan,
    "accumulated": accumulated,
    "averaged": averaged,
}


def ops_of(call):
    """The ops of the graph that runs last in `call`, as the runtime has them after all of its passes."""
    eager = context.context()
    eager.enable_graph_collection()
    try:
        call()
        graphs = eager.export_run_metadata().function_graphs
    finally:
        eager.disable_graph_collection()
    functions = [Counter(node.op for graph in found.partition_graphs for node in graph.node) for found in graphs]
    return max(functions, key=Counter.total, default=Counter())


def computing(ops):
    return {op: count for op, count in ops.items() if op not in NO_COMPUTING and not op.startswith("MemOp")}


def run(name, optimize):
    """The ops of the last graph that ran, and the outputs of every step; `optimize` takes a `tf.function`."""
    keras.utils.set_random_seed(1)
    step, batch = NETS[name]()
    function = optimize(tf.function(step))
    batch = tuple(map(tf.constant, batch))
    outputs, ops = [], Counter()
    for _ in range(STEPS):
        ops = ops_of(lambda: outputs.append([float(each).hex() for each in tf.nest.flatten(function(*batch))])) or ops
    return function, ops, outputs


def least(name, options):
    """The smallest budget, as the error for a smaller one names it."""
    try:
        run(name, lambda function: tfmem.optimize(function, memory_budget=1 << 10, **options))
    except tfmem.InfeasibleBudgetError as error:
        return int(re.search(r"at least ([\d,]+)", str(error))[1].replace(",", ""))
    raise AssertionError(f"{name} fits into 1 KiB")


def compare(name):
    options = {"passes": ("offload",), "policy": "vdnn_all" if name == "pooled" else "autovm"}
    _, theirs, expected = run(name, lambda function: function)
    budget = 38 << 20 if name == "pooled" else least(name, options)  # of the 41 MiB that it takes with oneDNN
    once, original = Counter(), equal.equal_numbers

    def recorded(graph, *arguments):
        found = original(graph, *arguments)
        once.clear()  # the graph that is read last runs
        once.update(graph[other].op for each in found for other in each.others)
        return found

    with mock.patch.object(equal, "equal_numbers", recorded):
        function, ours, outputs = run(name, lambda function: tfmem.optimize(function, memory_budget=budget, **options))
    return {
        "once": computing(once),
        "decision": tfmem.report(function).decision,
        "moves": ours["MemOpOffload"],
        "ops": [computing(theirs), computing(ours)],
        "outputs": [expected, outputs],
    }


if __name__ == "__main__":
    print(json.dumps({name: compare(name) for name in sys.argv[1:]}))
