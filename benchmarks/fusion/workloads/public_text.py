"""Training steps of language models, a block or two of each, in public Keras layers; weights and data are made up.

Sizes are small: which ops a step has does not depend on them."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
from keras import layers, ops

from benchmarks.fusion.workloads.models import training
from benchmarks.fusion.workloads.workload import Workload

BATCH, LENGTH, SIZE, HEADS, WORDS = 4, 32, 64, 4, 500
Tensor = keras.KerasTensor
classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def words(*shape: int, end: int = WORDS) -> np.ndarray:
    """Made up tokens."""
    return np.random.default_rng(0).integers(0, end, shape).astype(np.int32)


class RMSNorm(layers.Layer):
    """x / sqrt(mean(x^2)) * scale, as LLaMA, Gemma and T5 have it."""

    def build(self, shape: tuple[int, ...]) -> None:
        """The scale."""
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x: Tensor) -> Tensor:
        """The result."""
        return x * ops.rsqrt(ops.mean(ops.square(x), axis=-1, keepdims=True) + 1e-6) * self.scale


def rotated(x: Tensor) -> Tensor:
    """`[batch, length, heads, size]` with rotary embeddings, halves as in LLaMA."""
    length, size = x.shape[1], x.shape[-1]
    angle = np.outer(np.arange(length), 10000.0 ** (-np.arange(size // 2) / (size // 2))).astype(np.float32)
    sin, cos = (ops.convert_to_tensor(each(angle)[None, :, None, :]) for each in (np.sin, np.cos))
    first, second = ops.split(x, 2, axis=-1)
    return ops.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(layers.Layer):
    """Causal attention of grouped heads, with rotary embeddings or with ALiBi's slopes."""

    def __init__(self, groups: int = HEADS, rotary: bool = True, window: int = LENGTH) -> None:
        super().__init__()
        self.groups, self.rotary, self.window = groups, rotary, window
        self.query = layers.Dense(SIZE, use_bias=False)
        self.pair = layers.Dense(2 * groups * SIZE // HEADS, use_bias=False)
        self.result = layers.Dense(SIZE, use_bias=False)

    def call(self, x: Tensor) -> Tensor:
        """Rows that attend to those before them."""
        length, size = x.shape[1], SIZE // HEADS
        query = ops.reshape(self.query(x), [-1, length, HEADS, size])
        key, value = ops.split(ops.reshape(self.pair(x), [-1, length, self.groups, 2 * size]), 2, axis=-1)
        if self.rotary:
            query, key = rotated(query), rotated(key)
        key, value = (ops.repeat(each, HEADS // self.groups, axis=2) for each in (key, value))
        scores = ops.einsum("bthd,bshd->bhts", query, key) / size**0.5
        behind = np.arange(length)[:, None] - np.arange(length)[None, :]
        if not self.rotary:
            scores -= ops.convert_to_tensor(
                (np.abs(behind) * 2.0 ** -np.arange(1, HEADS + 1)[:, None, None]).astype(np.float32)
            )
        seen = ops.convert_to_tensor((behind >= 0) & (behind < self.window))
        weights = ops.softmax(ops.where(seen, scores, -1e9), axis=-1)
        return self.result(ops.reshape(ops.einsum("bhts,bshd->bthd", weights, value), [-1, length, SIZE]))


def _gated(x: Tensor, activation: str) -> Tensor:
    gate = layers.Dense(2 * SIZE, activation=activation, use_bias=False)(x)
    return layers.Dense(SIZE, use_bias=False)(gate * layers.Dense(2 * SIZE, use_bias=False)(x))


def _decoder(
    attention: Callable[[], layers.Layer],
    inner: Callable[[Tensor], Tensor],
    norm: Callable[[], layers.Layer],
    parallel: bool = False,
    optimizer: keras.optimizers.Optimizer | None = None,
) -> Workload:
    """Two blocks that guess each next token, with the embedding as the last matrix."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input([LENGTH], dtype="int32")
    embedding = layers.Embedding(WORDS, SIZE)
    x = embedding(tokens)
    for _ in range(2):
        normal = norm()(x)
        if parallel:
            x = x + attention()(normal) + inner(normal)
        else:
            x = x + attention()(normal)
            x = x + inner(norm()(x))
    model = keras.Model(tokens, ops.matmul(norm()(x), ops.transpose(embedding.embeddings)))
    text = words(BATCH, LENGTH + 1)
    optimizer = optimizer or keras.optimizers.AdamW(1e-3, global_clipnorm=1.0)
    return training(model, optimizer, (text[:, :-1],), text[:, 1:], classes)


def _dense(x: Tensor, activation: str = "gelu") -> Tensor:
    return layers.Dense(SIZE)(layers.Dense(4 * SIZE, activation=activation)(x))


def llama() -> Workload:
    """keras-hub's LlamaBackbone: RMSNorm, rotary embeddings, grouped queries, SwiGLU"""
    return _decoder(lambda: Attention(2), lambda x: _gated(x, "silu"), RMSNorm)


def mistral() -> Workload:
    """keras-hub's MistralBackbone: LLaMA's blocks within a sliding window"""
    return _decoder(lambda: Attention(1, window=8), lambda x: _gated(x, "silu"), RMSNorm)


def gemma() -> Workload:
    """keras-hub's GemmaBackbone: RMSNorm, rotary embeddings, one key for all queries, GeGLU"""
    return _decoder(lambda: Attention(1), lambda x: _gated(x, "gelu"), RMSNorm)


def falcon() -> Workload:
    """keras-hub's FalconBackbone: attention and inner layer side by side"""
    return _decoder(lambda: Attention(1), _dense, layers.LayerNormalization, parallel=True)


def bloom() -> Workload:
    """keras-hub's BloomBackbone: ALiBi"""
    return _decoder(lambda: Attention(rotary=False), _dense, layers.LayerNormalization)


def opt() -> Workload:
    """keras-hub's OPTBackbone: ReLU, with Lion"""
    optimizer = keras.optimizers.Lion(1e-4)
    return _decoder(Attention, lambda x: _dense(x, "relu"), layers.LayerNormalization, optimizer=optimizer)


def _mixture(x: Tensor) -> Tensor:
    """Two of four experts a token; all of them compute, as in Keras code without ragged products."""
    scores, chosen = ops.top_k(layers.Dense(4)(x), 2)
    weights = ops.sum(ops.one_hot(chosen, 4) * ops.softmax(scores)[..., None], axis=-2)
    made = ops.stack([_gated(x, "silu") for _ in range(4)], axis=-1)
    return ops.sum(made * weights[..., None, :], axis=-1)


def mixtral() -> Workload:
    """keras-hub's MixtralBackbone: a mixture of experts by TopK"""
    return _decoder(lambda: Attention(2), _mixture, RMSNorm)


def _attended(x: Tensor, other: Tensor, causal: bool = False) -> Tensor:
    attention = layers.MultiHeadAttention(HEADS, SIZE // HEADS, dropout=0.1)
    return layers.LayerNormalization()(x + attention(x, other, use_causal_mask=causal))


def _encoded(x: Tensor, blocks: int = 2, activation: str = "gelu") -> Tensor:
    for _ in range(blocks):
        x = _attended(x, x)
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(_dense(x, activation)))
    return x


def _embedded(tokens: Tensor, embedding: layers.Layer | None = None) -> Tensor:
    places = layers.Embedding(LENGTH, SIZE)(ops.arange(LENGTH)[None, :])
    return layers.Dropout(0.1)(
        layers.LayerNormalization()((embedding or layers.Embedding(WORDS, SIZE))(tokens) + places)
    )


def bert() -> Workload:
    """keras-hub's BertBackbone: hidden words, with Adam"""
    keras.utils.set_random_seed(0)
    tokens, places = keras.Input([LENGTH], dtype="int32"), keras.Input([5], dtype="int32")
    x = ops.take_along_axis(_encoded(_embedded(tokens)), places[..., None], axis=1)
    model = keras.Model([tokens, places], layers.Dense(WORDS)(layers.LayerNormalization()(_dense(x))))
    inputs = words(BATCH, LENGTH), words(BATCH, 5, end=LENGTH)
    return training(model, keras.optimizers.Adam(1e-4), inputs, words(BATCH, 5), classes)


def albert() -> Workload:
    """keras-hub's AlbertBackbone: one block that is used twice, factored embeddings; with LAMB"""
    keras.utils.set_random_seed(0)
    tokens = keras.Input([LENGTH], dtype="int32")
    rows = keras.Input([LENGTH, SIZE])
    block = keras.Model(rows, _encoded(rows, 1))
    x = layers.Dense(SIZE)(layers.Embedding(WORDS, 16)(tokens))
    x = block(block(x))
    model = keras.Model(tokens, layers.Dense(3)(layers.Dense(SIZE, activation="tanh")(x[:, 0])))
    return training(model, keras.optimizers.Lamb(1e-3), (words(BATCH, LENGTH),), words(BATCH, end=3), classes)


def distilbert() -> Workload:
    """keras-hub's DistilBertBackbone, distilled: soft targets of a teacher"""
    keras.utils.set_random_seed(0)
    tokens = keras.Input([LENGTH], dtype="int32")
    student = layers.Dense(WORDS)(_encoded(_embedded(tokens), 1))
    model = keras.Model(tokens, student)
    teacher = np.random.default_rng(0).random((BATCH, LENGTH, WORDS), np.float32)
    return training(
        model,
        keras.optimizers.Adam(1e-4),
        (words(BATCH, LENGTH),),
        teacher / teacher.sum(-1, keepdims=True),
        lambda targets, logits: keras.losses.kl_divergence(targets, ops.softmax(logits / 2.0)),
    )


def electra() -> Workload:
    """keras-hub's ElectraBackbone: which words were replaced"""
    keras.utils.set_random_seed(0)
    tokens = keras.Input([LENGTH], dtype="int32")
    model = keras.Model(tokens, layers.Dense(1)(_encoded(_embedded(tokens))))
    labels = words(BATCH, LENGTH, 1, end=2).astype(np.float32)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return training(model, keras.optimizers.AdamW(1e-4), (words(BATCH, LENGTH),), labels, loss)


def fnet() -> Workload:
    """keras-hub's FNetBackbone: Fourier transforms in place of attention"""
    keras.utils.set_random_seed(0)
    tokens = keras.Input([LENGTH], dtype="int32")
    x = _embedded(tokens)
    for _ in range(2):
        x = layers.LayerNormalization()(x + ops.fft2((x, ops.zeros_like(x)))[0])
        x = layers.LayerNormalization()(x + _dense(x))
    model = keras.Model(tokens, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))
    return training(model, keras.optimizers.Adam(1e-4), (words(BATCH, LENGTH),), words(BATCH, end=2), classes)


class Buckets(layers.Layer):
    """T5's relative positions: a number for each pair of places and each head."""

    def build(self, shape: tuple[int, ...]) -> None:
        """A row for each bucket."""
        self.table = self.add_weight(shape=(16, HEADS), initializer="normal")

    def call(self, x: Tensor) -> Tensor:
        """Attention with the bias."""
        places = np.clip(np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None, :] + 8, 0, 15)
        bias = ops.transpose(ops.take(self.table, places, axis=0), [2, 0, 1])
        heads = ops.transpose(ops.reshape(x, [-1, LENGTH, HEADS, SIZE // HEADS]), [0, 2, 1, 3])
        weights = ops.softmax(ops.matmul(heads, ops.transpose(heads, [0, 1, 3, 2])) + bias)
        return ops.reshape(ops.transpose(ops.matmul(weights, heads), [0, 2, 1, 3]), [-1, LENGTH, SIZE])


def t5() -> Workload:
    """keras-hub's T5Backbone: relative positions, RMSNorm, encoder and decoder; with Adafactor"""
    keras.utils.set_random_seed(0)
    source, target = keras.Input([LENGTH], dtype="int32"), keras.Input([LENGTH], dtype="int32")
    embedding = layers.Embedding(WORDS, SIZE)
    x = embedding(source)
    x = x + layers.Dense(SIZE)(Buckets()(layers.Dense(SIZE)(RMSNorm()(x))))
    x = RMSNorm()(x + _gated(RMSNorm()(x), "gelu"))
    y = _attended(embedding(target), x)
    model = keras.Model([source, target], layers.Dense(WORDS, use_bias=False)(y + _gated(RMSNorm()(y), "gelu")))
    text = words(2, BATCH, LENGTH)
    return training(model, keras.optimizers.Adafactor(1e-3), (text[0], text[1]), text[1], classes)


def bart() -> Workload:
    """keras-hub's BartBackbone, and Keras's example 'English-to-Spanish translation with a Transformer'"""
    keras.utils.set_random_seed(0)
    source, target = keras.Input([LENGTH], dtype="int32"), keras.Input([LENGTH], dtype="int32")
    embedding = layers.Embedding(WORDS, SIZE)
    encoded = _encoded(_embedded(source, embedding), 1)
    x = _embedded(target, embedding)
    x = _attended(_attended(x, x, causal=True), encoded)
    model = keras.Model([source, target], layers.Dense(WORDS)(layers.LayerNormalization()(x + _dense(x))))
    text = words(2, BATCH, LENGTH)
    return training(model, keras.optimizers.Adam(1e-4), (text[0], text[1]), text[1], classes)


def whisper() -> Workload:
    """keras-hub's WhisperBackbone: convolutions over a spectrogram, encoder and decoder"""
    keras.utils.set_random_seed(0)
    sound, target = keras.Input([2 * LENGTH, 16]), keras.Input([LENGTH], dtype="int32")
    x = layers.Conv1D(SIZE, 3, padding="same", activation="gelu")(sound)
    x = _encoded(layers.Conv1D(SIZE, 3, 2, padding="same", activation="gelu")(x), 1)
    y = _embedded(target)
    y = _attended(_attended(y, y, causal=True), x)
    model = keras.Model([sound, target], layers.Dense(WORDS)(layers.LayerNormalization()(y + _dense(y))))
    text = words(BATCH, LENGTH)
    spectrum = np.random.default_rng(0).random((BATCH, 2 * LENGTH, 16), np.float32)
    return training(model, keras.optimizers.AdamW(1e-4), (spectrum, text), text, classes)


def _recurrent(layer: Callable[[], layers.Layer], pooled: bool) -> Workload:
    keras.utils.set_random_seed(0)
    tokens = keras.Input([LENGTH], dtype="int32")
    x = layer()(layers.Embedding(WORDS, SIZE)(tokens))
    x = layers.GlobalMaxPooling1D()(x) if pooled else x
    model = keras.Model(tokens, layers.Dense(2)(x))
    return training(model, keras.optimizers.RMSprop(1e-3), (words(BATCH, LENGTH),), words(BATCH, end=2), classes)


def bilstm() -> Workload:
    """Keras's example 'Bidirectional LSTM on IMDB'"""
    return _recurrent(lambda: layers.Bidirectional(layers.LSTM(SIZE)), pooled=False)


def gru() -> Workload:
    """Keras's guide 'Working with RNNs', with a GRU"""
    return _recurrent(lambda: layers.GRU(SIZE), pooled=False)


def text_cnn() -> Workload:
    """Keras's example 'Text classification from scratch'"""
    return _recurrent(lambda: layers.Conv1D(SIZE, 7, padding="valid", activation="relu", strides=3), pooled=True)


def word2vec() -> Workload:
    """TensorFlow's tutorial 'word2vec': skip-grams with negative samples"""
    keras.utils.set_random_seed(0)
    target, context = keras.Input([], dtype="int32"), keras.Input([5], dtype="int32")
    made = [layers.Embedding(WORDS, SIZE)(each) for each in (target, context)]
    model = keras.Model([target, context], ops.einsum("be,bce->bc", *made))
    inputs = words(64), words(64, 5)
    return training(model, keras.optimizers.Adam(1e-3), inputs, np.zeros(64, np.int32), classes)


_MADE = (llama, mistral, gemma, falcon, bloom, opt, mixtral, bert, albert, distilbert, electra, fnet, t5, bart, whisper)
WORKLOADS = {make.__name__: make for make in (*_MADE, bilstm, gru, text_cnn, word2vec)}
