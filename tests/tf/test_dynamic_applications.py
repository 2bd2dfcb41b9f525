"""The applications of VPPS's evaluation as examples: each trains, and is what plain TensorFlow computes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "examples").is_dir():
    pytest.skip("the examples are not installed; run from a checkout", allow_module_level=True)

from examples import (  # noqa: E402
    biaffine_parser,
    bilstm_tagger,
    dependencies,
    dynamic_training,
    graph_net,
    molecules,
    rvnn,
    sentences,
    tags,
    td_lstm,
    td_rnn,
    tree_lstm,
    trees,
)
from tests.tf import plain_applications as plain  # noqa: E402
from tfmem import dynamic  # noqa: E402

STEPS = 50
HIDDEN = 8
SMALL = ("--sentences", "400", "--batch", "8")


def over_trees(net_class):
    def make(optimizer):
        examples = trees.made(20, seed=3)
        words = dynamic_training.numbered([word for tree in examples for word in tree_lstm.words_of(tree)])
        net = net_class(len(words) + 1, 6, HIDDEN, optimizer=optimizer)
        net.vocabulary = words
        return net, examples

    return make


def over_sentences(net_class):
    def make(optimizer):
        examples = sentences.made(20, seed=3)
        words = dynamic_training.numbered([word for text, _ in examples for word in text.split()])
        net = net_class(len(words) + 1, 6, HIDDEN, optimizer=optimizer)
        net.vocabulary = words
        return net, examples

    return make


def over_tags(characters):
    def make(optimizer):
        examples = [sentence[:9] for sentence in tags.made(20, seed=3)]
        return bilstm_tagger.tagger(examples, characters, embedding=6, hidden=HIDDEN, optimizer=optimizer), examples

    return make


def over_molecules(optimizer):
    return graph_net.GraphNet(HIDDEN, optimizer=optimizer), molecules.made(20, seed=3)


def over_dependencies(optimizer):
    examples = dependencies.made(20, seed=3)
    words = dynamic_training.numbered([word for sentence in examples for word, _ in sentence])
    return biaffine_parser.Parser(words, 6, HIDDEN, 5, optimizer=optimizer), examples


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (over_trees(tree_lstm.TreeLSTM), plain.tree_lstm),
        (over_trees(rvnn.RvNN), plain.rvnn),
        (over_sentences(td_rnn.TDRNN), plain.td_rnn),
        (over_sentences(td_lstm.TDLSTM), plain.td_lstm),
        (over_tags(False), plain.bilstm_tagger),
        (over_tags(True), plain.bilstm_character_tagger),
        (over_molecules, plain.graph_net),
        (over_dependencies, plain.biaffine_parser),
    ],
    ids=[
        "tree_lstm",
        "rvnn",
        "td_rnn",
        "td_lstm",
        "bilstm_tagger",
        "bilstm_character_tagger",
        "graph_net",
        "biaffine_parser",
    ],
)
def test_fifty_steps_are_those_of_plain_tensorflow(make, loss):
    rate = 0.02
    (net, examples), (other, _) = make(dynamic.SGD(rate)), make(dynamic.SGD(rate))
    initial = [value.numpy() for value in net.handle.parameters]
    for step in range(STEPS):
        chosen = [examples[(2 * step + i) % len(examples)] for i in range(2)]
        rows = dynamic_training.rows_of(net, chosen)
        losses = net.handle.step([net.graph(example) for example in chosen], inputs=rows or None).losses
        with tf.GradientTape() as tape:
            expected = [loss(other, example) for example in chosen]
            total = tf.add_n(expected)
        weights = [each for each in other.handle.parameters if each.trainable]
        gradients = tape.gradient(total, weights, unconnected_gradients="zero")
        np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-4, err_msg=f"step {step}")
        for parameter, gradient in zip(weights, gradients, strict=True):
            parameter.assign_sub(rate * tf.convert_to_tensor(gradient))
    for value, before, expected in zip(net.handle.parameters, initial, other.handle.parameters, strict=True):
        if not value.trainable:
            continue
        assert np.any(value.numpy() != before)
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("main", "given", "least"),
    [
        (rvnn.main, ["--hidden", "32", *SMALL], 0.5),
        (td_rnn.main, ["--sentences", "2000", "--epochs", "6"], 0.7),
        (td_lstm.main, ["--sentences", "2000"], 0.8),
        (bilstm_tagger.main, ["--hidden", "16", "--embedding", "16", *SMALL], 0.8),
        (bilstm_tagger.main, ["--hidden", "16", "--embedding", "16", "--characters", *SMALL], 0.9),
        (graph_net.main, ["--hidden", "32", "--molecules", "1000", "--epochs", "4"], 0.8),
        (biaffine_parser.main, ["--hidden", "24", "--embedding", "24", *SMALL], 0.9),
    ],
    ids=["rvnn", "td_rnn", "td_lstm", "bilstm_tagger", "bilstm_character_tagger", "graph_net", "biaffine_parser"],
)
def test_an_example_learns_and_draws_its_curve(main, given, least, tmp_path, capsys):
    curve = tmp_path / "curve.png"
    losses = main([*given, "--curve", str(curve)])
    shown = capsys.readouterr()
    found = [float(number) for number in re.findall(r"accuracy on held-out \w+ (\S+)", shown.out)]
    assert found[-1] > least
    assert np.mean(losses[-20:]) < 0.7 * np.mean(losses[:5])
    assert f"epoch {len(found)}: 100%" in shown.err
    assert curve.read_bytes().startswith(b"\x89PNG")


def test_files_are_read_and_split(tmp_path):
    tagged = tmp_path / "tagged.txt"
    tagged.write_text("On|O Foo|Bar|I-ORG\n\n./.|O\n")
    assert tags.read(tagged) == [[("On", "O"), ("Foo|Bar", "I-ORG")], [("./.", "O")]]
    args = dynamic_training.options(None).parse_args(["--train", str(tagged)])
    train, test = dynamic_training.data(args, tags.read, tags.made, held_out=2)
    assert (len(train), len(test)) == (1, 1)
    args.test = tagged
    assert [len(part) for part in dynamic_training.data(args, tags.read, tags.made)] == [2, 2]
    tagged.write_text("On|O Foo\n")
    with pytest.raises(ValueError, match=r"tagged\.txt:1: 'Foo' is no word\|tag"):
        tags.read(tagged)
    tagged.write_text("\n")
    with pytest.raises(ValueError, match="has no sentence"):
        tags.read(tagged)


def test_sentences_with_heads_are_read(tmp_path):
    given = tmp_path / "given.conllu"
    line = "{0}\t{1}\t_\t_\t_\t_\t{2}\t_\t_\t_\n"
    words = line.format("1", "The", 2) + line.format("1-2", "x", "_") + line.format("2", "Dog", 0)
    given.write_text("# a sentence\n" + words + "\n" + "".join(line.format(n, "w", 0) for n in range(1, 40)))
    assert dependencies.read(given) == [[("the", 2), ("dog", 0)]]
    given.write_text("1\tThe\n")
    with pytest.raises(ValueError, match=r"given\.conllu:1: '1\tThe' has no head"):
        dependencies.read(given)


def test_made_molecules_and_sentences_are_whole():
    for molecule in molecules.made(200):
        assert all(molecule.hydrogens(atom) >= 0 for atom in range(len(molecule.atoms)))
        assert all(1 <= len(molecule.neighbours[atom]) <= 4 for atom in range(len(molecule.atoms)))
    labels = [molecule.label for molecule in molecules.made(1000)]
    assert 0.4 < np.mean(labels) < 0.6
    for sentence in dependencies.made(200):
        heads = [head for _, head in sentence]
        assert heads.count(0) == 1
        for word in range(1, len(heads) + 1):
            path = [word]
            while path[-1] and len(path) <= len(heads):
                path.append(heads[path[-1] - 1])
            assert path[-1] == 0


def test_several_roots_are_one_example():
    table = tf.Variable([[1.0], [10.0], [100.0]])
    leaf = dynamic.node(lambda children, row: dynamic.embedding_lookup(table, row))
    top = dynamic.node(lambda children: dynamic.Result(children[0], children[0]), children=1)
    handle = dynamic.specialize([table], {"leaf": leaf, "top": top}, state=1)
    shared = handle.node("leaf", 1)
    roots = [handle.node("top", shared), handle.node("top", handle.node("leaf", 2)), handle.node("top", shared)]
    batch = handle.batch([roots, roots[0]])
    assert batch.kinds.to_list() == [[0, 1, 0, 1, 1], [0, 1]]
    np.testing.assert_array_equal(handle.forward([roots, roots[:1]]).losses, [120, 10])
