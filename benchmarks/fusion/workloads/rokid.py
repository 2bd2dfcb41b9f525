"""Speech recognition by a Transformer with CTC, after espnet's recipe for AISHELL, of one utterance of 200 frames."""

from __future__ import annotations

import tensorflow as tf

from benchmarks.fusion.workloads.layers import Attention, Dense, Norm, positions
from benchmarks.fusion.workloads.workload import Source, Workload

FRAMES = 200
MELS = 80
CHANNELS = 256
BLOCKS = 12
SIZE = 256
HEADS = 4
INNER = 2048
CHARACTERS = 4233
EPSILON = 1e-12


def make(form: type[Attention] = Attention) -> Workload:
    """Inference: the best character of each frame, and the logarithms of all probabilities."""
    source = Source()
    means, deviations = source.gaussian(MELS), 1 + source.uniform(MELS)
    filters = [source.normal(3, 3, inputs, CHANNELS, scale=(9 * inputs) ** -0.5) for inputs in (1, CHANNELS)]
    filter_biases = [source.zeros(CHANNELS) for _ in filters]
    frames, mels = after(after(FRAMES)), after(after(MELS))
    embed = Dense.draw(source, mels * CHANNELS, SIZE)
    blocks = [
        (
            Norm.draw(source, SIZE, EPSILON),
            form.draw(source, SIZE, HEADS, bias=True),
            Norm.draw(source, SIZE, EPSILON),
            Dense.draw(source, SIZE, INNER),
            Dense.draw(source, INNER, SIZE),
        )
        for _ in range(BLOCKS)
    ]
    norm, head = Norm.draw(source, SIZE, EPSILON), Dense.draw(source, SIZE, CHARACTERS)
    places = positions(frames, SIZE)

    @tf.function
    def step(speech: tf.Tensor) -> tuple[tf.Tensor, ...]:
        image = ((speech - means) / deviations)[None, :, :, None]
        for kernel, bias in zip(filters, filter_biases, strict=True):
            image = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(image, kernel, 2, "VALID"), bias))
        x = embed(tf.reshape(image, [frames, mels * CHANNELS])) * SIZE**0.5 + places
        for before_attention, attend, before_feed_forward, first, second in blocks:
            x += attend.over_itself(before_attention(x))
            x += second(tf.nn.swish(first(before_feed_forward(x))))
        log_probabilities = tf.nn.log_softmax(head(norm(x)))
        return tf.argmax(log_probabilities, 1), log_probabilities

    return Workload(step, (source.gaussian(FRAMES, MELS),), source.variables)


def after(size: int) -> int:
    """What a convolution of 3 with stride 2 leaves of a dimension."""
    return (size - 3) // 2 + 1
