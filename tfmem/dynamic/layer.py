"""A Keras layer over graphs: an encoder of trees under ordinary layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from custom_ops.errors import DynamicError
from tfmem.dynamic.batch import as_batch
from tfmem.dynamic.dtypes import is_type
from tfmem.dynamic.handle import Handle
from tfmem.dynamic.inputs import inputs as made
from tfmem.dynamic.kinds import NodeKind, State
from tfmem.dynamic.specialize import specialize


@keras.saving.register_keras_serializable(package="tfmem.dynamic")  # Keras loads no class that is not registered
class Layer(keras.layers.Layer):
    """A Keras layer that returns the state of each example's last node, which by convention is its root.

    Its input is a batch of graphs: a dict or tuple of `kinds`, `children` and `arguments`, int32 tensors
    `[examples, nodes]` padded with -1 (`tf.data.Dataset.padded_batch`) or ragged ones. The result is
    `[examples, width]`, the first vector of the state. If kinds have losses, their mean over the examples is added to
    the model's loss. Rows of real numbers, such as the vectors of layers below, are further entries of the dict.

    A model with the layer is saved and cloned as any other. The saved model holds only the name of the function that
    makes the kinds. To load it, import `tfmem.dynamic`, and register that function by
    `keras.saving.register_keras_serializable` or pass it in `custom_objects`.
    """

    def __init__(
        self,
        parameters: Mapping[str, Sequence[int]],
        kinds: Callable[[Mapping[str, tf.Variable]], Mapping[str, NodeKind]],
        *,
        state: State | int,
        initializer: Any = "glorot_uniform",
        **options: Any,
    ) -> None:
        """Make a layer with new weights.

        Args:
            parameters: the shape of each weight by name; those of one dimension begin as zeros. A shape `(None, width)`
                is an input of that name, `[examples, rows, width]`, of which an example's arguments count its rows.
            kinds: a function from the weights by name to the kinds of nodes, as `specialize` takes them.
            state: the widths of a node's state.
            initializer: of matrices.
            options: Keras's.

        Raises:
            DynamicError: as `specialize`.
        """
        super().__init__(**options)
        state = state if isinstance(state, int) else tuple(state)
        self._given = {
            "parameters": {name: list(shape) for name, shape in parameters.items()},
            "kinds": kinds,
            "state": state if isinstance(state, int) else list(state),
            "initializer": keras.initializers.serialize(keras.initializers.get(initializer)),
        }
        own = tf.as_dtype(self.variable_dtype)
        self._numbers = own if is_type(own) else tf.float32
        variables = {}
        for name, shape in parameters.items():
            if shape[0] is None:
                variables[name] = made(int(shape[-1]), name, self._numbers)
                continue
            first = initializer if len(shape) > 1 else "zeros"
            weight = self.add_weight(shape=tuple(shape), initializer=first, name=name, dtype=self._numbers.name)
            variables[name] = weight.value
        self._inputs = tuple(name for name, shape in parameters.items() if shape[0] is None)
        self._handle = specialize(list(variables.values()), kinds(variables), state=state)
        self._adds_loss = any(line.startswith("put_loss") for line in self._handle.text.splitlines())
        self._seeds = keras.random.SeedGenerator()  # dropout's, a new one for each call
        self._width = (state,) if isinstance(state, int) else state

    @property
    def handle(self) -> Handle:
        """The handle, which makes batches and runs them without Keras."""
        return self._handle

    def call(self, inputs: Any, training: bool | None = None) -> tf.Tensor:
        """The roots' states; see the class.

        Raises:
            tf.errors.InvalidArgumentError: an example has no nodes, and so no root; or as of `Handle.forward`.
        """
        batch = as_batch(inputs)
        checked = tf.debugging.assert_positive(
            batch.kinds.row_lengths(),
            "an example has no nodes; a tfmem.dynamic.Layer needs at least one, whose state is the result",
        )
        seed = tf.cast(self._seeds.next()[1], tf.int64) if training else 0
        rows = [tf.cast(inputs[name], self._numbers) for name in self._inputs] if self._inputs else None
        outcome = self._handle.forward(batch, inputs=rows, training=bool(training), states=True, seed=seed)
        if self._adds_loss:
            self.add_loss(tf.reduce_mean(outcome.losses))
        with tf.control_dependencies([checked] if checked is not None else []):
            return tf.gather(outcome.states[0], batch.kinds.row_limits() - 1)

    def get_config(self) -> dict[str, Any]:
        """The configuration that the layer was made with."""
        return {**super().get_config(), **self._given}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Layer:
        """A layer with this configuration and new weights."""
        kinds = config["kinds"]
        if isinstance(kinds, Mapping):  # of a saved model
            kinds = keras.saving.deserialize_keras_object(kinds)
        return cls(**{**config, "kinds": kinds})

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, int]:
        """`[examples, width]`."""
        shapes = [input_shape["kinds"]] if isinstance(input_shape, Mapping) and input_shape else list(input_shape)
        if not shapes:
            raise DynamicError("a tfmem.dynamic.Layer needs kinds, children and arguments as inputs; pass a Batch")
        return (shapes[0][0], self._width[0])
