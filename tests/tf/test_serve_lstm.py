"""The serving example, small: sentences of each format, and a run from training to latencies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.tf.python_server import run_python

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "examples").is_dir():
    pytest.skip("the examples are not installed; run from a checkout", allow_module_level=True)

from examples import sentences, serve_lstm  # noqa: E402

TREES = """\
(4 (2 A) (3 (3 triumph) (2 .)))
(1 (2 (1 -LRB-) (2 (2 A) (3 -RRB-))) (0 (0 dull) (2 comedy\\/thriller)))
(2 (2 So) (2 so))
"""


def test_trees_give_the_labels_of_their_roots_without_neutral_ones(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(TREES)
    (tmp_path / "dev.txt").write_text("(0 (2 Not) (3 this))\n\n(3 (2 But) (3 that))\n")
    train, test = sentences.read(tmp_path)
    assert train == [("A triumph .", 1), ("( A ) dull comedy/thriller", 0)]
    assert test == [("Not this", 0), ("But that", 1)]


@pytest.mark.parametrize(
    "line", ["{text}\t{number}", "{number}\t{text}", "{text}\t{word}"], ids=["label last", "label first", "words"]
)
def test_tables_are_read_in_either_order_and_every_tenth_line_is_kept_for_the_test(tmp_path: Path, line: str) -> None:
    labels = [number % 3 == 0 for number in range(20)]
    lines = [
        line.format(text=f"sentence {n}", number=int(label), word="positive" if label else "Negative")
        for n, label in enumerate(labels)
    ]
    path = tmp_path / "reviews.tsv"
    path.write_text("\n".join(["sentence\tlabel", *lines]))
    train, test = sentences.read(path)
    assert [text for text, _ in test] == ["sentence 0", "sentence 10"]
    assert len(train) == 18
    assert dict(train + test) == {f"sentence {n}": int(label) for n, label in enumerate(labels)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("good\t1\nbad\t0\nso so\tneutral\n", r":3 is neither a sentiment tree nor a sentence and its label"),
        ("(x (2 A))\n", ":1 is no sentiment tree"),
        ("good\t1\nfine\t1\n", "has 2 sentences, but not both positive and negative"),
        ("", "has 0 sentences"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sentences.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        sentences.read(path)
    assert serve_lstm.main(["--data", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_made_sentences_come_from_the_seed_and_need_more_than_counting_words() -> None:
    train, test = sentences.made(4000, seed=1), sentences.made(1000, seed=2)
    assert train == sentences.made(4000, seed=1)
    assert abs(np.mean([label for _, label in train]) - 0.5) < 0.03
    votes: dict[str, list[int]] = {}
    for text, label in train:
        for word in set(text.split()):
            votes.setdefault(word, []).append(label)
    weights = {word: np.log((sum(v) + 1) / (len(v) - sum(v) + 1)) for word, v in votes.items()}
    guesses = [sum(weights.get(word, 0) for word in set(text.split())) > 0 for text, _ in test]
    assert np.mean([guess == label for guess, (_, label) in zip(guesses, test, strict=True)]) < 0.75


def test_percentiles_and_gains_are_those_of_the_times() -> None:
    before = np.linspace(0.001, 0.101, 101)
    lines = serve_lstm.table([serve_lstm.Latencies(8, before, before / 4)]).splitlines()
    assert lines[1].split() == ["8", "51.000", "91.000", "100.000", "before"]
    assert lines[2].split() == ["8", "12.750", "22.750", "25.000", "after"]
    assert lines[3].split() == ["4.0", "x"] * 3


@pytest.mark.long
def test_the_example_serves_the_same_answers_from_a_replaced_layer(tmp_path: Path) -> None:
    arguments = ["--units=20", "--layers=2", "--epochs=1", "--batch", "1", "3", "--requests=20"]
    finished = run_python(["-m", "examples.serve_lstm", *arguments, "--output", str(tmp_path)], cwd=ROOT)
    assert finished.returncode == 0, finished.stdout + finished.stderr[-2000:]
    assert "1000 answers before and after: 0 changed" in finished.stdout
    assert serve_lstm.is_replaced(tmp_path / "model_tfmem")
    assert not serve_lstm.is_replaced(tmp_path / "model")
    assert (tmp_path / "serve_lstm.png").stat().st_size > 10_000
