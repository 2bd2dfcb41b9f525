"""Train a small LSTM on the sentiment of sentences, export it as a SavedModel, and time its answers before and after
`tfmem.optimize`.

    python -m examples.serve_lstm
    python -m examples.serve_lstm --data trees/

Without `--data` the sentences are made from a small grammar. Real ones: the Stanford Sentiment Treebank, whose folder
`trees` (https://nlp.stanford.edu/sentiment/trainDevTestTrees_PTB.zip) can be given as it is; or any file of lines
"sentence TAB label".

The exported model takes strings and gives the probability that each is positive, for any number of sentences of any
length. The table has the latency of one request; the picture has all of them."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples import sentences

PERCENTILES = (50, 90, 99)
ROUNDS = 5  # before and after take turns, so that a busy moment of the machine hits both
SAMPLES = 5  # sentences printed with their probabilities
TOLERANCE = 1e-4  # of a probability, float32 over a sentence's length


@dataclass(frozen=True)
class Latencies:
    """Seconds of each request, before and after, and how many sentences a request holds."""

    batch: int
    before: np.ndarray
    after: np.ndarray


def main(arguments: list[str] | None = None) -> int:
    """Train, export, optimise, compare. Returns 1 when the optimised model is not the same model, or not optimised."""
    options = parse(arguments)
    try:
        if options.data:
            train, test = sentences.read(options.data)
        else:
            train, test = sentences.made(4000, seed=1), sentences.made(1000, seed=2)
    except (OSError, ValueError) as error:
        print(f"cannot read the sentences: {error}", file=sys.stderr)
        return 2
    origin = options.data or "a small grammar (real ones: --data)"
    print(f"{len(train)} sentences to train on and {len(test)} to test with, from {origin}")

    import tensorflow as tf

    import tfmem

    tf.config.experimental.enable_tensor_float_32_execution(False)  # answers are held against each other closely
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    output = options.output or Path(tempfile.mkdtemp(prefix="serve_lstm-"))
    output.mkdir(parents=True, exist_ok=True)
    original, optimized = output / "model", output / "model_tfmem"

    model = trained(train, test, options)
    model.export(str(original), verbose=False)
    tfmem.optimize(str(original), output=str(optimized))
    print(tfmem.report(str(optimized)).to_text())

    before, after = load(original), load(optimized)
    texts = [text for text, _ in test]
    old, new = answers(before, texts), answers(after, texts)
    print(table_of_samples(test, old, new))
    timings = [time_requests(before, after, texts, batch, options.requests) for batch in options.batch]
    print(f"\n{table(timings)}")
    print(f"\npicture and models: {draw(timings, output / 'serve_lstm.png').parent}")

    difference = float(np.abs(old - new).max())
    changed = int(np.sum((old > 0.5) != (new > 0.5)))
    print(f"{len(texts)} answers before and after: {changed} changed, probabilities at most {difference:.1g} apart")
    if changed or not difference <= TOLERANCE:
        print("FAILED: the optimised model answers differently", file=sys.stderr)
        return 1
    if not is_replaced(optimized):
        print("FAILED: the recurrent layer was not replaced; the report says why", file=sys.stderr)
        return 1
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.serve_lstm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, help="sentences: a file, or a folder with train.txt and dev.txt")
    parser.add_argument("--units", type=_positive, default=128, help="the LSTM's size (128)")
    parser.add_argument("--layers", type=_positive, default=1, help="LSTMs on top of each other (1)")
    parser.add_argument("--epochs", type=_positive, default=4, help="passes over the sentences (4)")
    parser.add_argument("--batch", type=_positive, nargs="+", default=[1, 16], help="sentences in a request (1 16)")
    parser.add_argument("--requests", type=_positive, default=500, help="requests that are timed, of each kind (500)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder for models and picture (a new temporary one)")
    return parser.parse_args(arguments)


def trained(train: list[sentences.Sentence], test: list[sentences.Sentence], options: argparse.Namespace):
    """A Keras model from strings [batch] to probabilities [batch, 1]; prints how often it is right."""
    import keras
    import tensorflow as tf
    from tqdm import tqdm

    keras.utils.set_random_seed(options.seed)
    texts, labels = (np.array(column) for column in zip(*train, strict=True))
    words = keras.layers.TextVectorization(max_tokens=10_000)  # lower case, no punctuation
    words.adapt(texts)
    recurrent = [
        keras.layers.LSTM(options.units, return_sequences=layer + 1 < options.layers) for layer in range(options.layers)
    ]
    classifier = keras.Sequential(
        [
            keras.layers.Embedding(words.vocabulary_size(), 64, mask_zero=True),
            *recurrent,
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    classifier.compile("adam", "binary_crossentropy", metrics=["accuracy"], jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices((texts, labels)).shuffle(len(texts), seed=options.seed).batch(64)
    data = data.map(lambda text, label: (words(text), label))
    bar = tqdm(total=options.epochs * len(data), desc="training", unit="step")

    def show(batch: int, logs: dict[str, float]) -> None:
        bar.set_postfix(accuracy=f"{logs['accuracy']:.3f}", refresh=False)
        bar.update()

    progress = keras.callbacks.LambdaCallback(on_train_batch_end=show)
    classifier.fit(data, epochs=options.epochs, verbose=0, shuffle=False, callbacks=[progress])
    bar.close()
    model = keras.Sequential([keras.Input((), dtype="string"), words, classifier])
    held_out, truth = zip(*test, strict=True)
    right = (model.predict(tf.data.Dataset.from_tensors(list(held_out)), verbose=0)[:, 0] > 0.5) == truth
    print(f"right about {right.mean():.1%} of the sentences it was not trained on")
    return model


Serve = Callable[[list[str]], np.ndarray]


def load(path: Path) -> Serve:
    """A server's function over a SavedModel: probabilities [batch] of sentences."""
    import tensorflow as tf

    import tfmem

    tfmem.load_ops()  # an optimised model holds tfmem's ops
    model = tf.saved_model.load(str(path))
    signature = model.signatures["serving_default"]
    ((name, _),) = signature.structured_input_signature[1].items()

    def serve(texts: list[str]) -> np.ndarray:
        (probability,) = signature(**{name: tf.constant(texts)}).values()
        return probability.numpy()[:, 0]

    serve.model = model  # keeps its variables alive
    return serve


def answers(serve: Serve, texts: list[str]) -> np.ndarray:
    """All probabilities, with one sentence in a request and with all in one: the other sentences must not matter."""
    alone = np.concatenate([serve([text]) for text in texts])
    together = serve(texts)
    if not np.abs(alone - together).max() <= TOLERANCE:
        raise SystemExit("a sentence's probability depends on those beside it: the mask is not respected")
    return alone


def time_requests(before: Serve, after: Serve, texts: list[str], batch: int, requests: int) -> Latencies:
    """Seconds of each request; both serve the same requests, in turns."""
    random = np.random.default_rng(batch)
    chosen = [list(random.choice(texts, batch)) for _ in range(requests)]
    seconds: tuple[list[float], list[float]] = ([], [])
    for part in np.array_split(np.arange(requests), min(ROUNDS, requests)):
        for serve, times in zip((before, after), seconds, strict=True):
            serve(chosen[part[0]])  # the other one's weights fill the caches
            for request in part:
                began = time.perf_counter()
                serve(chosen[request])
                times.append(time.perf_counter() - began)
    return Latencies(batch, np.array(seconds[0]), np.array(seconds[1]))


def table(timings: list[Latencies]) -> str:
    lines = [f"{'sentences':>9}" + "".join(f"{f'p{p}':>11}" for p in PERCENTILES) + "   milliseconds a request"]
    for timing in timings:
        rows = [np.percentile(times, PERCENTILES) for times in (timing.before, timing.after)]
        for row, name in zip(rows, ("before", "after"), strict=True):
            lines.append(f"{timing.batch:9}" + "".join(f"{1e3 * value:11.3f}" for value in row) + f"   {name}")
        lines.append(" " * 9 + "".join(f"{f'{one / other:.1f} x':>11}" for one, other in zip(*rows, strict=True)))
    return "\n".join(lines)


def table_of_samples(test: list[sentences.Sentence], old: np.ndarray, new: np.ndarray) -> str:
    lines = ["", "probability of being positive", "   before      after   truth"]
    for (text, label), one, other in list(zip(test, old, new, strict=True))[:SAMPLES]:
        short = text if len(text) < 80 else text[:77] + "..."
        lines.append(f"{one:9.6f}  {other:9.6f}   {'+' if label else '-'}       {short}")
    return "\n".join(lines)


def is_replaced(path: Path) -> bool:
    """Whether a SavedModel holds the op by which tfmem replaces a recurrent layer."""
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    model = SavedModel.FromString((path / "saved_model.pb").read_bytes())
    graphs = [meta.graph_def for meta in model.meta_graphs]
    nodes = [node for graph in graphs for node in graph.node]
    nodes += [node for graph in graphs for function in graph.library.function for node in function.node_def]
    return any(node.op == "TfmemRecurrent" for node in nodes)


def draw(timings: list[Latencies], path: Path) -> Path:
    """The share of requests that were answered within a time, before and after."""
    from tfmem.plot import AFTER, BEFORE, new_figure

    figure = new_figure(4.5 * len(timings), 3.4)
    for axes, timing in zip(figure.subplots(1, len(timings), squeeze=False)[0], timings, strict=True):
        for times, colour, name in ((timing.before, BEFORE, "before"), (timing.after, AFTER, "after")):
            share = np.arange(1, len(times) + 1) / len(times)
            label = f"{name}: median {1e3 * np.median(times):.2f} ms"
            axes.step(1e3 * np.sort(times), 100 * share, where="post", color=colour, label=label)
        longest = 1e3 * max(np.percentile(times, 99.5) for times in (timing.before, timing.after))
        axes.set_xlim(0, longest * 1.05)
        axes.set_title(f"{timing.batch} sentence{'s' * (timing.batch > 1)} a request", loc="left", fontsize=11)
        axes.set_xlabel("milliseconds")
        axes.set_ylabel("requests answered (%)")
        axes.legend(frameon=False, fontsize=9, loc="lower right")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    return path


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
