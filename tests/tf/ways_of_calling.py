"""Every way of calling a `tf.function`: what it takes, and how it is handed over."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

ROWS, WIDTH, LAYERS = 1024, 128, 14  # a layer's output takes 512 KiB; smaller blocks than 256 KiB are not counted
BATCH = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
SPEC = tf.TensorSpec([None, WIDTH])
FIXED = tf.TensorSpec([ROWS, WIDTH])


class Pair(NamedTuple):
    """A structure with names."""

    x: Any
    scale: Any


class Net:
    """A deep net, and its loss and gradient.

    Attributes:
        weights: of all its layers.
        model: what it is part of, if there is something.
    """

    model: Any = None

    def __init__(self) -> None:
        """A net with equal weights each time."""
        self.weights = tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], [1, 2], stddev=0.1))

    def train(self, x: Any, scale: Any = 1.0) -> dict[str, Any]:
        """Loss and gradient; `x` is read twice, so that a gradient of it has something to wait for."""
        with tf.GradientTape() as tape:
            h = x
            for _ in range(LAYERS):
                h = tf.tanh(h @ self.weights) * scale
            loss = tf.reduce_mean(h**2)
        return {"loss": loss, "gradient": (tape.gradient(loss, self.weights),)}


Decorate = Callable[[Any], Any]


@dataclass(frozen=True)
class Way:
    """One way of calling.

    Attributes:
        name: of it.
        function: what becomes a `tf.function`; takes a net first.
        call: new arguments: positional ones and keywords.
        options: of `tf.function`.
        make: the callable of a net, given `function`, the net, and what makes a `tf.function` and decorates it.
    """

    name: str
    function: Callable[..., Any]
    call: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    options: dict[str, Any] = field(default_factory=dict)
    make: Callable[[Callable[..., Any], Net, Decorate], Any] = MethodType

    def __str__(self) -> str:
        return self.name.replace(" ", "_")

    def traced(self, decorate: Decorate) -> tuple[Any, Net]:
        """What is called, and the net that it trains; `decorate` is given the `tf.function`."""
        net = Net()
        if self.make is MethodType:
            return decorate(tf.function(MethodType(self.function, net), **self.options)), net
        return self.make(self.function, net, lambda function: decorate(tf.function(function, **self.options))), net


def as_function(function: Callable[..., Any], net: Net, decorate: Decorate) -> Any:
    def step(batch: Any, training: bool = False) -> Any:
        return function(net, batch, training)

    return decorate(step)


def as_partial(function: Callable[..., Any], net: Net, decorate: Decorate) -> Any:
    return decorate(functools.partial(function, net))


def as_partial_with_keywords(function: Callable[..., Any], net: Net, decorate: Decorate) -> Any:
    return decorate(functools.partial(function, net, training=True))


def as_method(function: Callable[..., Any], net: Net, decorate: Decorate) -> Any:
    """A method that is decorated in its class."""

    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        @decorate
        def step(self, batch: Any, training: bool = False) -> Any:
            return function(self.net, batch, training)

    net.model = Model()  # its methods do not hold it
    return net.model.step


def as_attribute(function: Callable[..., Any], net: Net, decorate: Decorate) -> Any:
    """A method of a `tf.Module` that is decorated when the module is made."""

    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net
            self.step = decorate(self.run)

        def run(self, batch: Any, training: bool = False) -> Any:
            return function(self.net, batch, training)

    return Model().step


def as_call(function: Callable[..., Any], net: Net, decorate: Decorate) -> Any:
    """The call of an object."""

    class Model(tf.Module):
        @decorate
        def __call__(self, batch: Any, training: bool = False) -> Any:
            return function(net, batch, training)

    return Model()


def as_static_method(function: Callable[..., Any], net: Net, decorate: Decorate) -> Any:
    class Model:
        @staticmethod
        @decorate
        def step(batch: Any, training: bool = False) -> Any:
            return function(net, batch, training)

    return Model().step


def take(*args: Any, **kwargs: Any) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments that are made for each call: a function without arguments makes one."""

    def made() -> tuple[tuple[Any, ...], dict[str, Any]]:
        def one(item: Any) -> Any:
            return item() if callable(item) else item

        return tuple(map(one, args)), {name: one(item) for name, item in kwargs.items()}

    return made


def plain(net: Net, batch: Any, training: bool = False) -> Any:
    return net.train(batch, 2.0 if training else 1.0)


def of_dict(net: Net, batch: Any, training: bool = False) -> Any:
    return net.train(batch["x"], batch["scale"] if training else 1.0)


def of_list(net: Net, batch: Any, training: bool = False) -> Any:
    return net.train(batch[0], batch[1][0] if training else 1.0)


def of_pair(net: Net, batch: Pair, training: bool = False) -> Any:
    return Pair(net.train(batch.x), batch.scale)


def of_number(net: Net, scale: Any, training: bool = False) -> Any:
    return net.train(tf.constant(BATCH), scale)


def of_none(net: Net, batch: Any = None, mask: Any = None) -> Any:
    return net.train(tf.constant(BATCH) if batch is None else batch), mask


def of_text(net: Net, batch: Any, mode: Any = "train") -> Any:
    return net.train(batch), mode


def of_dtype(net: Net, batch: Any, dtype: Any = tf.float32) -> Any:
    return net.train(tf.cast(batch, dtype))


def of_ragged(net: Net, batch: Any, training: bool = False) -> Any:
    return net.train(batch.to_tensor(shape=[ROWS, WIDTH])), batch


def of_sparse(net: Net, batch: Any, training: bool = False) -> Any:
    return net.train(tf.sparse.to_dense(batch)), batch


def of_iterator(net: Net, batches: Any, training: bool = False) -> Any:
    return net.train(tf.ensure_shape(next(batches), [ROWS, WIDTH]))


def of_dataset(net: Net, batches: Any, training: bool = False) -> Any:
    total = 0.0
    for batch in batches:
        total += net.train(batch)["loss"]
    return total


def of_default(net: Net, batch: Any, scale: Any = tf.constant(0.5), *, shift: Any = tf.constant(0.25)) -> Any:  # noqa: B008
    return net.train(batch + shift, scale)


def of_keywords(net: Net, batch: Any, *, training: bool, scale: Any = 0.5) -> Any:
    return net.train(batch, scale if training else 1.0)


def of_many(net: Net, *batches: Any, scale: Any = 1.0) -> Any:
    return [net.train(batch, scale) for batch in batches]


def of_named(net: Net, batch: Any, **others: Any) -> Any:
    return net.train(batch, others.get("scale", 1.0)), dict(others)


def of_all(net: Net, batch: Any, scale: Any = 1.0, *rest: Any, training: bool = True, **others: Any) -> Any:
    sums = [tf.reduce_sum(part) for part in tf.nest.flatten((rest, others))]
    return net.train(batch, scale if training else 1.0), sums


def of_three(net: Net, a: Any, b: Any = None, c: Any = 2.0) -> Any:
    return net.train(a if b is None else a + b, c)


def of_spec(net: Net, batch: Any, training: Any = False) -> Any:
    return net.train(tf.ensure_shape(batch, [ROWS, WIDTH]), tf.where(training, 2.0, 1.0))


def of_nothing_else(net: Net, batch: Any, shift: Any = 0.5) -> Any:
    return tf.reduce_sum(tf.convert_to_tensor(batch) + shift)


def tensor() -> Any:
    return tf.constant(BATCH)


def scalar() -> Any:
    return tf.constant(0.5)


def ragged() -> Any:
    return tf.RaggedTensor.from_tensor(tf.constant(BATCH))


def sparse() -> Any:
    return tf.sparse.from_dense(tf.constant(BATCH) * tf.cast(tf.constant(BATCH) > 1.0, tf.float32))


def dataset() -> Any:
    return tf.data.Dataset.from_tensor_slices(BATCH).batch(ROWS, drop_remainder=True)


def iterator() -> Iterator[Any]:
    return iter(dataset().repeat(2))


VARIABLE = functools.partial(tf.Variable, BATCH)
SPECS = {"input_signature": [SPEC]}

WAYS = [
    Way("a tensor", plain, take(tensor)),
    Way("a tensor, all given", plain, take(tensor, training=True)),
    Way("a tensor by keyword", plain, take(batch=tensor)),
    Way("keywords in another order", plain, take(training=True, batch=tensor)),
    Way("a default as a tensor", of_spec, take(tensor, training=lambda: tf.constant(True))),
    Way("an array", plain, take(BATCH)),
    Way("an array by keyword", plain, take(batch=BATCH)),
    Way("a dictionary", of_dict, take({"x": BATCH, "scale": 0.5})),
    Way("a dictionary of tensors", of_dict, take(lambda: {"scale": scalar(), "x": tensor()}, True)),
    Way("a list", of_list, take([BATCH, [0.5]])),
    Way("a nested tuple", of_list, take(lambda: (tensor(), (scalar(), {"unread": np.float32(1)})))),
    Way("a namedtuple", of_pair, take(lambda: Pair(tensor(), scalar()))),
    Way("a namedtuple with None", of_pair, take(lambda: Pair(tensor(), None))),
    Way("a number", of_number, take(0.5)),
    Way("a scalar of NumPy", of_number, take(np.float32(0.5))),
    Way("a number that is traced", of_number, take(0.5), {"input_signature": [tf.TensorSpec([])]}),
    Way("None", of_none, take(None)),
    Way("no argument", of_none, take()),
    Way("None by keyword", of_none, take(tensor, mask=None)),
    Way("a text", of_text, take(tensor, "evaluate")),
    Way("a text as the default", of_text, take(BATCH)),
    Way("a text that is traced", of_text, take(tensor, lambda: tf.constant("evaluate"))),
    Way("a dtype", of_dtype, take(BATCH.astype(np.float64), tf.float32)),
    Way("a dtype as the default", of_dtype, take(BATCH.astype(np.float64))),
    Way("a variable", plain, take(VARIABLE)),
    Way("a variable by keyword", plain, take(batch=VARIABLE)),
    Way("a ragged tensor", of_ragged, take(ragged)),
    Way("a sparse tensor", of_sparse, take(sparse)),
    Way("an iterator", of_iterator, take(iterator)),
    Way("a data set", of_dataset, take(dataset)),
    Way("defaults that are tensors", of_default, take(tensor)),
    Way("one of the defaults", of_default, take(tensor, shift=0.5)),
    Way("keywords only", of_keywords, take(tensor, training=True)),
    Way("keywords only, all given", of_keywords, take(BATCH, scale=scalar, training=True)),
    Way("many", of_many, take(tensor, BATCH, tensor)),
    Way("many and a keyword", of_many, take(tensor, scale=scalar)),
    Way("names", of_named, take(tensor, scale=scalar, other=BATCH[0])),
    Way("names of no parameter", of_named, take(batch=tensor)),
    Way("everything", of_all, take(BATCH, 0.5, BATCH[:1], training=True, other=lambda: [scalar(), 1])),
    Way("little of everything", of_all, take(tensor)),
    Way("the third by keyword", of_three, take(tensor, c=scalar)),
    Way("the second by keyword", of_three, take(tensor, b=BATCH)),
    Way("a signature", plain, take(tensor), {"input_signature": [FIXED]}),
    Way("a signature and an array", plain, take(BATCH.astype(np.float64).tolist()), {"input_signature": [FIXED]}),
    Way("a signature by keyword", plain, take(batch=tensor), {"input_signature": [FIXED]}),
    Way("an open signature", of_spec, take(tensor), SPECS),
    Way("a signature of a default", of_spec, take(BATCH), {"input_signature": [SPEC, tf.TensorSpec([], tf.bool)]}),
    Way("relaxed shapes", of_spec, take(BATCH), {"reduce_retracing": True}),
    Way("no autograph", plain, take(BATCH), {"autograph": False}),
    Way("an implementation", of_nothing_else, take(VARIABLE), {"experimental_implements": "a.net"}),
    Way("a function", plain, take(BATCH), make=as_function),
    Way("a function, by keyword", plain, take(batch=tensor), make=as_function),
    Way("a partial", plain, take(BATCH), make=as_partial),
    Way("a partial with keywords", plain, take(BATCH), make=as_partial_with_keywords),
    Way("a keyword of a partial", plain, take(BATCH, training=False), make=as_partial_with_keywords),
    Way("a method of a class", plain, take(BATCH), make=as_method),
    Way("a method of a class, a tensor", plain, take(tensor), make=as_method),
    Way("a method of a class, by keyword", plain, take(batch=tensor), make=as_method),
    Way("an attribute of a module", plain, take(BATCH), make=as_attribute),
    Way("a call of an object", plain, take(BATCH), make=as_call),
    Way("a static method", plain, take(BATCH), make=as_static_method),
]
