"""SavedModels whose functions were rewritten load, serve and train as before."""

import numpy as np
import pytest
import tensorflow as tf

from graph_passes.errors import GraphError
from tfmem.capture.concrete_function import capture_concrete, restore_concrete
from tfmem.capture.grappler import run_grappler
from tfmem.frontends.saved_model import optimize_saved_model


def rewrite(cf, name=""):
    """Marks the graph with two negations in front of the first Exp or Relu; Grappler would remove
    them.
    """
    captured = run_grappler(capture_concrete(cf))
    edited = tf.compat.v1.GraphDef()
    edited.CopyFrom(captured.graph_def)
    for node in [node for node in edited.node if node.op == "Exp"]:
        for name, source in (("n1", node.input[0]), ("n2", "n1")):
            edited.node.add(name=name, op="Neg", input=[source]).attr["T"].type = tf.float32.as_datatype_enum
        node.input[0] = "n2"
    return restore_concrete(cf, captured, edited)


class Model(tf.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.weights = tf.Variable([[1.0], [2.0]])
        initializer = tf.lookup.TextFileInitializer(
            vocabulary,
            tf.string,
            tf.lookup.TextFileIndex.WHOLE_LINE,
            tf.int64,
            tf.lookup.TextFileIndex.LINE_NUMBER,
        )
        self.table = tf.lookup.StaticHashTable(initializer, -1)

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 2], name="features"),
            tf.TensorSpec([None], tf.string),
        ]
    )
    def predict(self, features, words):
        return {"score": tf.exp(features @ self.weights), "index": self.table.lookup(words)}

    @tf.function(input_signature=[{"x": tf.TensorSpec([None, 2]), "y": tf.TensorSpec([None, 1])}])
    def train(self, batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.exp(batch["x"] @ self.weights) - batch["y"]) ** 2)
        self.weights.assign_sub(0.01 * tape.gradient(loss, self.weights))
        return loss


@pytest.fixture
def saved(tmp_path):
    vocabulary = tmp_path / "words.txt"
    vocabulary.write_text("a\nb\n")
    model = Model(str(vocabulary))
    path = tmp_path / "model"
    tf.saved_model.save(model, str(path), signatures={"serve": model.predict})
    vocabulary.unlink()
    return path


FEATURES = tf.constant([[0.1, 0.2], [0.3, -0.4]])
WORDS = tf.constant(["b", "z"])
BATCH = {"x": FEATURES, "y": tf.constant([[1.0], [2.0]])}


def test_signatures_functions_variables_and_assets(saved, tmp_path):
    output = optimize_saved_model(saved, tmp_path / "out", rewrite)
    old, new = tf.saved_model.load(str(saved)), tf.saved_model.load(output)
    old_signature, new_signature = old.signatures["serve"], new.signatures["serve"]
    assert new_signature.structured_input_signature == old_signature.structured_input_signature
    assert new_signature.structured_outputs.keys() == old_signature.structured_outputs.keys()
    for one, other in [
        (
            old_signature(features=FEATURES, words=WORDS),
            new_signature(features=FEATURES, words=WORDS),
        ),
        (old.predict(FEATURES, WORDS), new.predict(FEATURES, WORDS)),
    ]:
        assert one.keys() == other.keys()
        np.testing.assert_array_equal(other["score"], one["score"])
        np.testing.assert_array_equal(other["index"], [1, -1])
    for _ in range(3):
        np.testing.assert_allclose(new.train(BATCH), old.train(BATCH), rtol=1e-6)
    np.testing.assert_allclose(new.weights, old.weights, rtol=1e-6)


def test_grappler_stays_off_what_was_loaded(saved, tmp_path):
    new = tf.saved_model.load(optimize_saved_model(saved, tmp_path / "out", rewrite))
    calls = {
        "signature": lambda: new.signatures["serve"](features=FEATURES, words=WORDS),
        "attribute": lambda: new.predict(FEATURES, WORDS),
        "nested": tf.function(lambda: new.predict(FEATURES, WORDS)),
    }
    for name, call in calls.items():
        call()
        with tf.profiler.experimental.Profile(str(tmp_path / name)):
            call()
        executed = next((tmp_path / name).rglob("*.xplane.pb")).read_bytes()
        assert executed.count(b"n1:Neg") == executed.count(b"n2:Neg") != 0, name


def test_functions_left_alone_are_saved_as_they_were(saved, tmp_path):
    seen = []

    def keep(cf, name=""):
        seen.append(cf)
        return cf

    new = tf.saved_model.load(optimize_saved_model(saved, tmp_path / "out", keep))
    assert len(seen) == 3
    np.testing.assert_allclose(new.predict(FEATURES, WORDS)["score"], tf.exp(FEATURES @ [[1.0], [2.0]]))


def test_wrong_paths(saved, tmp_path):
    with pytest.raises(GraphError, match=r"saved_model\.pb"):
        optimize_saved_model(tmp_path, tmp_path / "out", rewrite)
    with pytest.raises(GraphError, match="not empty"):
        optimize_saved_model(saved, tmp_path, rewrite)


class Served(tf.Module):
    """Functions that users call by names of parameters, and with defaults."""

    @tf.function
    def of_traces(self, x, doubled=False, *, scale=1.0):
        return tf.exp(x) * (2.0 if doubled else 1.0) * scale

    @tf.function(input_signature=[tf.TensorSpec([None, 2], name="given"), tf.TensorSpec([], name="factor")])
    def of_a_signature(self, given, factor=3.0):
        return tf.exp(given) * factor


def test_functions_are_called_by_the_names_and_with_the_defaults_that_they_had(tmp_path):
    served, spec = Served(), tf.TensorSpec([None, 2])
    served.of_traces.get_concrete_function(spec)
    served.of_traces.get_concrete_function(spec, doubled=True, scale=0.5)
    tf.saved_model.save(served, str(tmp_path / "model"))
    path = optimize_saved_model(tmp_path / "model", tmp_path / "out", rewrite)
    found = tf.saved_model.load(path)
    for call in (
        lambda model: model.of_traces(FEATURES),
        lambda model: model.of_traces(x=FEATURES),
        lambda model: model.of_traces(FEATURES, True, scale=0.5),
        lambda model: model.of_traces(FEATURES, doubled=True, scale=0.5),
        lambda model: model.of_a_signature(FEATURES, tf.constant(2.0)),
        lambda model: model.of_a_signature(factor=2.0, given=FEATURES),
        lambda model: model.of_a_signature(FEATURES),
    ):
        np.testing.assert_array_equal(call(found), call(served))
    with pytest.raises(TypeError, match="other"):
        found.of_traces(FEATURES, other=1.0)
