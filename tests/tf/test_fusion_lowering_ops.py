"""Every op that has a rule, alone in a graph: lowered, it has TensorFlow's values."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.tf.fusion_lowering import Lowered

raw = tf.raw_ops
FLOATS = ("float32", "float64", "float16", "bfloat16")
NUMBERS = (*FLOATS, "int32", "int64")
# nothing is lost on the way: the same bits, NaN counts as NaN
EXACT = 0


def random(shape, dtype="float32", seed=0, special=True):
    draws = np.random.default_rng(seed)
    if dtype == "bool":
        return draws.random(shape) < 0.5
    if dtype in ("int32", "int64"):
        return draws.integers(-9, 9, shape).astype(dtype)
    values = draws.normal(scale=3, size=shape)
    if special and values.size > 8:
        places = draws.choice(values.size, 5, replace=False)
        values.reshape(-1)[places] = [0.0, -0.0, np.inf, -np.inf, np.nan]
    return values.astype(tf.as_dtype(dtype).as_numpy_dtype)


def compare(lowered: Lowered, ulps: int = EXACT, absolute: float = 1e-30):
    for found, expected in zip(lowered.run(), lowered.expected(), strict=True):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        if ulps == EXACT and found.dtype.kind != "V":
            np.testing.assert_array_equal(found, expected)
        else:  # of arrays of bfloat16 NumPy does not know that NaN is NaN
            spacing = np.finfo(found.dtype).eps if found.dtype.kind == "f" else 2.0**-8
            wide = found.astype("float64"), expected.astype("float64")
            np.testing.assert_allclose(*wide, rtol=ulps * spacing, atol=absolute if ulps else 0.0)


UNARY_EXACT = "Floor Ceil Rint Round Neg Abs Sign Square Relu Relu6 LeakyRelu Softsign IsNan IsInf IsFinite Sqrt"
UNARY = "Exp Expm1 Log Log1p Erf Erfc Sin Cos Atan Sinh Cosh Sigmoid Tanh Softplus Elu Selu Rsqrt Reciprocal Inv"
BINARY = "Add AddV2 Sub Mul RealDiv Maximum Minimum SquaredDifference MulNoNan DivNoNan Xdivy"
COMPARISONS = "Greater GreaterEqual Less LessEqual Equal NotEqual"


def unary(name, x):
    op = getattr(raw, name)
    return op(features=x) if name.endswith(("elu", "elu6", "Relu", "Softsign", "Softplus", "Elu")) else op(x=x)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", UNARY_EXACT.split())
def test_unary_ops_to_the_bit(name, dtype):
    compare(Lowered(lambda x: unary(name, x), random((7, 13), dtype)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", UNARY.split())
def test_functions(name, dtype):
    x = random((7, 13), dtype, special=name != "Erf")  # of infinity in float64 TensorFlow's is NaN
    compare(Lowered(lambda x: unary(name, x), x), ulps=8, absolute=1e-7 if name in ("Elu", "Selu") else 1e-30)


@pytest.mark.parametrize(
    "shapes", [((7, 13), (7, 13)), ((7, 13), (13,)), ((1, 5), (4, 1)), ((3, 1, 5), (2, 1)), ((), (3,))]
)
@pytest.mark.parametrize("name", BINARY.split())
def test_binary_ops_to_the_bit(name, shapes):
    x, y = (random(shape, seed=seed) for seed, shape in enumerate(shapes))
    compare(Lowered(lambda x, y: getattr(raw, name)(x=x, y=y), x, y))


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", BINARY.split())
def test_binary_ops_of_other_floats_to_the_bit(name, dtype):
    x, y = random((7, 13), dtype), random((13,), dtype, seed=1)
    compare(Lowered(lambda x, y: getattr(raw, name)(x=x, y=y), x, y))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("name", ["AddV2", "Sub", "Mul", "Maximum", "Minimum", "SquaredDifference"])
def test_integers_wrap(name, dtype):
    limits = np.iinfo(dtype)
    x = np.array([limits.max, limits.min, -1, 0, 7], dtype)
    compare(Lowered(lambda x, y: getattr(raw, name)(x=x, y=y), x[:, None], x))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("name", ["Neg", "Abs", "Sign", "Square"])
def test_unary_ops_of_integers(name, dtype):
    limits = np.iinfo(dtype)
    compare(Lowered(lambda x: getattr(raw, name)(x=x), np.array([limits.max, limits.min, -1, 0, 7], dtype)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    [
        *UNARY_EXACT.replace(" Rint", "").split(),
        "Exp",
        "Log",
        "Tanh",
        "Sigmoid",
        "Rsqrt",
    ],  # TensorFlow's Softplus is off by 2.5% in bfloat16
)
def test_unary_ops_of_half_types(name, dtype):
    """Functions within one unit in the last place: TensorFlow computes some of them in the half type."""
    compare(Lowered(lambda x: unary(name, x), random((7, 13), dtype)), 0 if name in UNARY_EXACT.split() else 4, 1e-4)


@pytest.mark.parametrize("dtype", [*NUMBERS, "bool"])
@pytest.mark.parametrize("name", COMPARISONS.split())
def test_comparisons(name, dtype):
    if dtype == "bool" and name not in ("Equal", "NotEqual"):
        pytest.skip("TensorFlow orders no truth values")
    x, y = random((7, 13), dtype), random((13,), dtype, seed=1)
    compare(Lowered(lambda x, y: getattr(raw, name)(x=x, y=y), x, y))


LAYOUT = {
    "reshape split": lambda x: raw.Reshape(tensor=x, shape=[4, 3, 2, 5]),
    "reshape join": lambda x: raw.Reshape(tensor=x, shape=[12, 10]),
    "reshape flat": lambda x: raw.Reshape(tensor=x, shape=[-1]),
    "reshape ones": lambda x: raw.Reshape(tensor=x, shape=[1, 4, 6, 1, 5]),
    "expand": lambda x: raw.ExpandDims(input=x, axis=-1),
    "squeeze": lambda x: raw.Squeeze(input=raw.ExpandDims(input=x, axis=1)),
    "identity": lambda x: raw.Identity(input=x),
    "transpose": lambda x: raw.Transpose(x=x, perm=[2, 0, 1]),
    "broadcast": lambda x: raw.BroadcastTo(input=x, shape=[3, 4, 6, 5]),
    "slice": lambda x: raw.Slice(input=x, begin=[1, 0, 2], size=[2, -1, 3]),
    "strided": lambda x: x[1:, ::-1, 1:4:2],
    "strided new": lambda x: x[2, tf.newaxis, ..., -3],
    "strided negative": lambda x: x[-3:-1, 5:0:-2],
    "concat": lambda x: raw.ConcatV2(values=[x, x[:, :1], 2 * x], axis=1),
    "concat equal": lambda x: raw.ConcatV2(values=[x, -x, 2 * x], axis=-1),
    "pack": lambda x: raw.Pack(values=[x, -x, x + 1], axis=1),
    "unpack": lambda x: raw.Unpack(value=x, num=4, axis=0)[2],
    "split": lambda x: raw.Split(axis=1, value=x, num_split=3),
    "split v": lambda x: raw.SplitV(value=x, size_splits=[1, 3, 2], axis=1, num_split=3),
    "pad": lambda x: raw.Pad(input=x, paddings=[[1, 0], [0, 0], [2, 3]]),
    "pad v2": lambda x: raw.PadV2(input=x, paddings=[[0, 0], [1, 1], [0, 2]], constant_values=7.0),
    "tile": lambda x: raw.Tile(input=x, multiples=[2, 1, 3]),
    "reverse": lambda x: raw.ReverseV2(tensor=x, axis=[0, -1]),
    "roll": lambda x: raw.Roll(input=x, shift=[1, -2], axis=[1, -1]),
    "roll twice": lambda x: raw.Roll(input=x, shift=[5, 3, -13], axis=[0, 2, -1]),
    "roll nowhere": lambda x: raw.Roll(input=x, shift=12, axis=1),
    "roll of a column": lambda x: raw.Roll(input=x[:, :1], shift=1, axis=1),
    "of roll": lambda x: raw.Roll(input=x * 2, shift=2, axis=1)[:, 3:, ::2],
    "part of roll": lambda x: raw.Roll(input=x, shift=2, axis=1)[:, :2],
    "roll of rows, reshaped": lambda x: tf.reshape(raw.Roll(input=tf.reshape(x, [24, 5]), shift=7, axis=0), [4, 30]),
    "band": lambda x: raw.MatrixBandPart(input=x, num_lower=1, num_upper=-1),
    "zeros": lambda x: raw.ZerosLike(x=x),
    "ones": lambda x: raw.OnesLike(x=x),
    "large constants": lambda x: tf.fill([40, 30], 0.5)[:4, :6, None] + x,
    "range": lambda x: raw.Range(start=3, limit=20, delta=4),
    "slice gradient": lambda x: raw.StridedSliceGrad(
        shape=[4, 20, 9], begin=[0, 15, 2], end=[4, 3, 7], strides=[1, -2, 1], dy=x
    ),
    "slice gradient, steps": lambda x: raw.StridedSliceGrad(
        shape=[4, 3, 20, 16], begin=[0, 1, 2, 1], end=[4, 2, 20, 16], strides=[1, 1, 3, 3], dy=x, shrink_axis_mask=2
    ),
    "fill": lambda x: raw.Fill(dims=[3, 2], value=x[0, 0, 0]),
    "of pad": lambda x: raw.Pad(input=x * 2, paddings=[[1, 0], [0, 0], [2, 3]])[:, ::2, 1:],
    "of concat": lambda x: raw.ConcatV2(values=[x, -x, 2 * x], axis=-1)[:, :, 4:9],
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUT)
def test_layout(name):
    compare(Lowered(LAYOUT[name], random((4, 6, 5))))


@pytest.mark.parametrize("axes", [[0], [1], [-1], [0, 1], [1, 2], [0, 2], [0, 1, 2], []])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", ["Sum", "Mean", "Max", "Min", "Prod"])
def test_reductions(name, keep, axes):
    x = random((4, 6, 5), special=name in ("Max", "Min"))
    exact = EXACT if name in ("Max", "Min") else 256
    compare(Lowered(lambda x: getattr(raw, name)(input=x, axis=axes, keep_dims=keep), x), exact)


@pytest.mark.parametrize("name", ["Any", "All"])
def test_logical_reductions(name):
    compare(Lowered(lambda x: getattr(raw, name)(input=x, axis=[1]), random((4, 6), "bool")))


@pytest.mark.parametrize("divisor", [3, -4, 1])
@pytest.mark.parametrize("op", ["FloorDiv", "FloorMod", "TruncateDiv", "Div"])
def test_division_of_integers(op, divisor):
    x = np.concatenate([random((50,), "int32"), [2**31 - 1, -(2**31) + 1, 0]]).astype("int32")
    compare(Lowered(lambda x: getattr(raw, op)(x=x, y=divisor), x))


@pytest.mark.parametrize("op", ["FloorDiv", "FloorMod"])
def test_division_rounded_down(op):
    x, y = random((7, 13)), random((13,), seed=1)
    x[0], x[1] = 2 * y, 0.0
    compare(Lowered(lambda x, y: getattr(raw, op)(x=x, y=y), x, y))


def test_xlogy():
    x, y = random((7, 13)), random((7, 13), seed=1)
    x[::2] = 0.0
    compare(Lowered(lambda x, y: raw.Xlogy(x=x, y=y), x, y), ulps=8)


GATHERS = {
    "rows": lambda x, i: raw.GatherV2(params=x, indices=i, axis=0),
    "columns": lambda x, i: raw.GatherV2(params=x, indices=i, axis=-1),
    "of a sum": lambda x, i: raw.GatherV2(params=x + x[:, :1], indices=i[0], axis=0),
    "of a reshape": lambda x, i: raw.GatherV2(params=raw.Reshape(tensor=x * x, shape=[6, 4]), indices=i, axis=0),
    "of a batch": lambda x, i: raw.GatherV2(params=x[:3], indices=i, axis=1, batch_dims=1),
    "of a batch, from the end": lambda x, i: raw.GatherV2(params=x[1:], indices=i, axis=-1, batch_dims=-1),
    "of a batch, further in": lambda x, i: raw.GatherV2(
        params=raw.Reshape(tensor=x[:3] * x[:3], shape=[3, 1, 6]), indices=i, axis=2, batch_dims=1
    ),
    "rows of a batch": lambda x, i: raw.GatherV2(
        params=raw.Reshape(tensor=x, shape=[2, 4, 3]), indices=i[:2], axis=1, batch_dims=1
    ),
    "all of a batch": lambda x, i: raw.GatherV2(
        params=raw.Reshape(tensor=x, shape=[3, 2, 4]), indices=i, axis=2, batch_dims=2
    ),
    "nd": lambda x, i: raw.GatherNd(params=x, indices=i),
    "one hot": lambda x, i: raw.OneHot(indices=i, depth=5, on_value=x[0, 0], off_value=0.5, axis=1),
    "one hot last": lambda x, i: raw.OneHot(indices=i, depth=3, on_value=1.0, off_value=x[1, 1], axis=-1),
}


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("name", GATHERS)
def test_gathers(name, dtype):
    compare(Lowered(GATHERS[name], random((4, 6)), np.array([[3, 0], [1, 1], [2, 3]], dtype)))


GRADIENTS = {
    "ReluGrad": "gradients features",
    "Relu6Grad": "gradients features",
    "LeakyReluGrad": "gradients features",
    "EluGrad": "gradients outputs",
    "SeluGrad": "gradients outputs",
    "SoftplusGrad": "gradients features",
    "SoftsignGrad": "gradients features",
    "SigmoidGrad": "y dy",
    "TanhGrad": "y dy",
    "ReciprocalGrad": "y dy",
    "InvGrad": "y dy",
    "SqrtGrad": "y dy",
    "RsqrtGrad": "y dy",
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_to_the_bit(name, dtype):
    """In sizes that TensorFlow's kernels take in whole vectors; the rest they multiply in another order."""
    x, y = random((8, 16), dtype), random((8, 16), dtype, seed=1)
    first, second = GRADIENTS[name].split()
    ulps = 4 if name == "SoftplusGrad" else EXACT
    compare(Lowered(lambda x, y: getattr(raw, name)(**{first: x, second: y}), x, y), ulps)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 17])
def test_add_n(count):
    """TensorFlow adds more than nine by first adding what it then writes into: its order differs between places."""
    lowered = Lowered(lambda *x: raw.AddN(inputs=x), *(random((7, 13), seed=seed) for seed in range(count)))
    compare(lowered, *((4, 1e-5) if count > 9 else (EXACT,)))


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_biases(data_format):
    x, bias = random((4, 5, 5, 5)), random((5,), seed=1)
    compare(Lowered(lambda x, bias: raw.BiasAdd(value=x, bias=bias, data_format=data_format), x, bias))
    x = random((4, 5, 5, 5), special=False)
    gradient = Lowered(lambda x: raw.BiasAddGrad(out_backprop=x, data_format=data_format), x)
    compare(gradient, ulps=64, absolute=1e-5)


def test_choices():
    condition, x, y = random((4, 6), "bool"), random((4, 6)), random((4, 6), seed=1)
    compare(Lowered(lambda c, x, y: raw.Select(condition=c, x=x, y=y), condition, x, y))
    compare(Lowered(lambda c, x, y: raw.Select(condition=c[:, 0], x=x, y=y), condition, x, y))
    compare(Lowered(lambda c, x, y: raw.Select(condition=c[0, 0], x=x, y=y), condition, x, y))
    compare(Lowered(lambda c, x, y: raw.SelectV2(condition=c[:, :1], t=x, e=y[0]), condition, x, y))
    compare(Lowered(lambda c, x, y: raw.ClipByValue(t=x, clip_value_min=-1.0, clip_value_max=y), condition, x, y))


@pytest.mark.parametrize("to", [*NUMBERS, "bool"])
@pytest.mark.parametrize("dtype", [*NUMBERS, "bool"])
def test_casts(dtype, to):
    x = random((7, 13), dtype, special=to in FLOATS)
    compare(Lowered(lambda x: raw.Cast(x=x, DstT=to), x))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_positions_of_extremes(op, dtype):
    x = random((9, 16), dtype)
    if dtype != "int32":
        x[2], x[3, ::2], x[4], x[5, 3:] = np.nan, np.nan, -np.inf, np.inf
        x[6, :2] = -np.inf, np.finfo(dtype).min
    compare(Lowered(lambda x: getattr(raw, op)(input=x, dimension=1), x))
    compare(Lowered(lambda x: getattr(raw, op)(input=x, dimension=0, output_type="int32"), x))


def test_half_of_the_squares():
    compare(Lowered(lambda x: raw.L2Loss(t=x), random((4, 6), special=False)), ulps=8)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_softmax(op, dtype):
    x = random((3, 5, 7), dtype, special=False)
    x[0, 0], x[1, 1, 2], x[2, 2] = 300.0, -np.inf, -300.0
    compare(Lowered(lambda x: getattr(raw, op)(logits=x), x), ulps=16, absolute=1e-15)


@pytest.mark.parametrize(("dtype", "eps"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_softmax_of_half_types_is_rounded_once(op, dtype, eps):
    """As on a GPU and in oneDNN; what it is made of, rounded op by op, is off by several hundredths in bfloat16."""
    x = random((30, 20), dtype, special=False)
    (found,) = Lowered(lambda x: getattr(raw, op)(logits=x), x).run()
    assert found.dtype == x.dtype
    exact = getattr(raw, op)(logits=x.astype("float64")).numpy()
    np.testing.assert_allclose(found.astype("float64"), exact, rtol=1.01 * eps, atol=2.0**-25)


@pytest.mark.parametrize("rows", [5, 1])
def test_cross_entropy(rows):
    x, labels = random((5, 7), special=False), np.abs(random((rows, 7), seed=1, special=False))
    compare(Lowered(lambda x, y: raw.SoftmaxCrossEntropyWithLogits(features=x, labels=y), x, labels), 64, 1e-6)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_sparse_cross_entropy(dtype):
    x, labels = random((5, 7), special=False), np.array([0, 6, 3, 3, 1], dtype)
    compare(Lowered(lambda x, y: raw.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=y), x, labels), 64, 1e-6)


def normalized(x, scale, offset, mean, variance, training, share):
    return raw.FusedBatchNormV3(
        x=x, scale=scale, offset=offset, mean=mean, variance=variance, epsilon=1e-3, is_training=training,
        exponential_avg_factor=share,
    )[:5]  # fmt: skip


@pytest.mark.parametrize(("training", "share"), [(True, 1.0), (True, 0.1), (False, 1.0)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_batch_norm(dtype, training, share):
    x, channels = random((4, 5, 3, 8), dtype, special=False), [random((8,), seed=seed) for seed in range(4)]
    channels[3] = np.abs(channels[3])
    wanted = slice(0, 5 if training else 1)  # else the rest are copies
    lowered = Lowered(lambda *given: normalized(*given, training, share)[wanted], x, *channels)
    compare(lowered, *((64, 1e-5) if dtype == "float32" else (4, 2e-3)))


@pytest.mark.parametrize("training", [True, False])
def test_the_gradient_of_batch_norm(training):
    upstream, x = random((4, 5, 3, 8), special=False), random((4, 5, 3, 8), special=False, seed=1)
    scale, mean, variance = (random((8,), seed=seed) for seed in range(3))

    def gradient(upstream, x, scale, mean, variance):
        return raw.FusedBatchNormGradV3(
            y_backprop=upstream, x=x, scale=scale, reserve_space_1=mean, reserve_space_2=variance,
            reserve_space_3=tf.zeros([0]), epsilon=1e-3, is_training=training,
        )[:3]  # fmt: skip

    compare(Lowered(gradient, upstream, x, scale, mean, np.abs(variance)), 256, 1e-4)
