"""The variational autoencoder of TensorFlow-Examples: tanh, tanh, sigmoid, and RMSProp."""

from __future__ import annotations

import tensorflow as tf

from benchmarks.fusion.workloads.workload import Source, Workload

BATCH = 64
PIXELS = 784
HIDDEN = 512
LATENT = 2
LAYERS = {
    "encoder": (PIXELS, HIDDEN),
    "mean": (HIDDEN, LATENT),
    "spread": (HIDDEN, LATENT),
    "decoder": (LATENT, HIDDEN),
    "pixels": (HIDDEN, PIXELS),
}


def make() -> Workload:
    """A training step."""
    source = Source()
    kernels = {name: source.normal(*shape, scale=glorot(shape[0])) for name, shape in LAYERS.items()}
    biases = {name: source.normal(shape[1], scale=glorot(shape[1])) for name, shape in LAYERS.items()}
    optimizer = tf.compat.v1.train.RMSPropOptimizer(0.001)

    def dense(name: str, x: tf.Tensor) -> tf.Tensor:
        return x @ kernels[name] + biases[name]

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            encoded = tf.nn.tanh(dense("encoder", x))
            mean, spread = dense("mean", encoded), dense("spread", encoded)
            noise = tf.random.normal([BATCH, LATENT], seed=0)
            z = mean + tf.exp(spread / 2) * noise
            decoded = tf.nn.sigmoid(dense("pixels", tf.nn.tanh(dense("decoder", z))))
            log_likelihood = x * tf.math.log(1e-10 + decoded) + (1 - x) * tf.math.log(1e-10 + 1 - decoded)
            divergence = -0.5 * tf.reduce_sum(1 + spread - tf.square(mean) - tf.exp(spread), 1)
            loss = tf.reduce_mean(divergence - tf.reduce_sum(log_likelihood, 1))
        optimizer.apply_gradients(zip(tape.gradient(loss, source.variables), source.variables, strict=True))
        return loss

    return Workload(step, (source.uniform(BATCH, PIXELS),), source.variables, optimizer.variables, draws=True)


def glorot(size: int) -> float:
    """The standard deviation that the original draws with; for a bias, its own length is the size."""
    return float((size / 2) ** -0.5)
