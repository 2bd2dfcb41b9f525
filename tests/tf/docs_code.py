"""Runs the Python blocks of pages of the documentation, in a new folder: `python -m tests.tf.docs_code PAGE ...`

Each page is a program: its blocks run in order, after the names that a reader has already. A block that has to be the
first of a program, because of a strategy of several workers or of Keras 2, runs in a separate process.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORKERS, LEGACY = "MultiWorkerMirroredStrategy()", "TF_USE_LEGACY_KERAS=1"
ROWS = "dataset = tf.data.Dataset.from_tensors((tf.ones([32, 128]), tf.zeros([32], tf.int32)))\n"


def given() -> dict[str, Any]:
    """The names that pages take for granted: a compiled model with data, a training step, an LSTM."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfmem

    layers = [keras.layers.Dense(16, "relu", name="dense"), keras.layers.Dense(4, name="classes")]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("sgd", "sparse_categorical_crossentropy")
    weights = tf.Variable(tf.ones([8, 8]))

    @tf.function(input_signature=[tf.TensorSpec([16, 8])])
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x @ weights))
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        return loss

    lstm = tf.Module()
    lstm.layer = keras.layers.LSTM(8)
    lstm.run = tf.function(lstm.layer, input_signature=[tf.TensorSpec([None, 5, 4])])
    photographs = tf.data.Dataset.from_tensors((tf.ones([2, 224, 224, 3]), tf.zeros([2], tf.int32)))
    images, labels = np.ones([64, 8], np.float32), np.zeros(64, np.int32)
    return {
        "keras": keras,
        "np": np,
        "tf": tf,
        "tfmem": tfmem,
        "model": model,
        "step": step,
        "lstm": lstm,
        "weights": weights,
        "images": images,
        "labels": labels,
        "dataset": photographs,
    }


def called(names: dict[str, Any]) -> None:
    """Call what a page optimised, as its reader would before asking for a report."""
    import tensorflow as tf

    names["step"](tf.ones([16, 8]))
    names["model"].fit(names["images"], names["labels"], verbose=0)


def graph_of(names: dict[str, Any]) -> dict[str, Any]:
    """A graph with a loss, for the blocks on `tf.Graph`."""
    import tensorflow as tf

    graph = tf.Graph()
    with graph.as_default():
        variable = tf.compat.v1.get_variable("w", [8, 8])
        loss = tf.reduce_sum(tf.tanh(tf.ones([4, 8]) @ variable))
        tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss)
    return {**names, "graph": graph, "loss": loss, "variables": [variable]}


def run(page: str) -> None:
    """Run a page's blocks, in the current folder."""
    import tensorflow as tf

    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    names = graph_of(given())
    names["graph"] = graph_of({})["graph"]  # a session runs the other
    names["optimizer"] = names["keras"].optimizers.SGD()
    names |= {"x": names["step"], "__called__": called}
    if any('tfmem.optimize("model"' in block for block in blocks):
        trainer = tf.Module()
        trainer.weights, trainer.step = names["weights"], names["step"]
        tf.saved_model.save(trainer, "model", signatures=trainer.step)
    for number, block in enumerate(blocks):
        if WORKERS in block or LEGACY in block:
            run_apart(block, f"{page}[{number}]")
            continue
        within = names["loss"].graph.as_default if "avm_gradients(" in block else contextlib.nullcontext
        program = block
        if "print(tfmem.report(" in block and ".fit(" not in block and "output=" not in block:
            ask, _, rest = block.rpartition("print(tfmem.report")
            program = f"{ask}__called__(globals())\nprint(tfmem.report{rest}"
        try:
            with within():
                exec(compile(program, f"{page}[{number}]", "exec"), names)
        except Exception as error:
            raise RuntimeError(f"block {number} of {page} failed: {type(error).__name__}: {error}\n{block}") from error


def run_apart(block: str, name: str) -> None:
    """Run a block in another process, its strategy before all else."""
    first, _, rest = block.partition("\n")
    program = f"import tensorflow as tf, tf_keras, tfmem\n{first}\n{ROWS}{rest}"
    environment = {**os.environ, **({"TF_USE_LEGACY_KERAS": "1"} if LEGACY in block else {})}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    if done.returncode:
        raise RuntimeError(f"block {name} failed: {done.stderr[-2000:]}\n{block}")


def main(pages: list[str]) -> None:
    """Run pages, each in a new folder."""
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            with contextlib.redirect_stdout(io.StringIO()):
                run(page)
            os.chdir(ROOT)
        print("ran", page)


if __name__ == "__main__":
    main(sys.argv[1:])
