"""One process of the benchmark of all applications: tfmem, and plain TensorFlow, eager and node by node."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.dynamic.applications_nets import made, numbers
from benchmarks.dynamic.timing import measure, parts_of, show
from examples.dynamic_training import rows_of
from tests.tf import plain_applications

OF_PLAIN = 16  # examples, since it takes long


def main(data: str, batch: int, count: int, names: list[str]) -> None:
    written = {}
    for name in names:
        net, examples = made(name, count)
        written[name] = numbers(name, net, examples)
        parts = parts_of(examples, batch)

        def given(part: list[Any], net: Any = net) -> tuple[Any, Any]:
            return net.handle.batch([net.graph(each) for each in part]), rows_of(net, part)

        def train(pair: tuple[Any, Any], net: Any = net) -> Any:
            return net.handle.step(pair[0], inputs=pair[1] or None).losses

        def both(part: list[Any], given: Any = given, train: Any = train) -> Any:
            return train(given(part))

        before = [(given(part), len(part)) for part in parts]
        timed("tfmem, batches made before", name, before, train)
        timed("tfmem", name, [(part, len(part)) for part in parts], both)
        weights = [each for each in net.handle.parameters if each.trainable]
        loss, adam = getattr(plain_applications, name), tf.keras.optimizers.Adam(0.003)
        adam.build(weights)

        def plain(part: list[Any], net: Any = net, weights: Any = weights, loss: Any = loss, adam: Any = adam) -> Any:
            with tf.GradientTape() as tape:
                total = tf.add_n([loss(net, each) for each in part])
            adam.apply_gradients(zip(tape.gradient(total, weights), weights, strict=True))
            return total

        timed("tensorflow", name, [(part, len(part)) for part in parts_of(examples[:OF_PLAIN], batch)], plain)
    Path(data).write_text(json.dumps(written))


def timed(system: str, name: str, batches: list[Any], train: Any) -> None:
    """Show a system's row."""
    found = measure(batches, train, lambda losses: losses.numpy(), 0)
    show(system=system, application=name, examples=found["sentences"], wall=found["wall"], processor=found["processor"])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
