"""The applications' nets and their examples, and the examples as numbers for other systems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from examples import (
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

HIDDEN = EMBEDDING = 64
SCORE, LAYERS, MIDDLE, SPELLING = 48, 3, 32, 20


def made(name: str, count: int) -> tuple[Any, list[Any]]:
    """A net, and examples for it."""
    if name in {"tree_lstm", "rvnn"}:
        examples: list[Any] = trees.made(count)
        net_class: Any = tree_lstm.TreeLSTM if name == "tree_lstm" else rvnn.RvNN
        return _over_words(net_class, [word for tree in examples for word in tree_lstm.words_of(tree)]), examples
    if name in {"td_rnn", "td_lstm"}:
        examples = sentences.made(count)
        net_class = td_rnn.TDRNN if name == "td_rnn" else td_lstm.TDLSTM
        return _over_words(net_class, [word for text, _ in examples for word in text.split()]), examples
    if name.startswith("bilstm"):
        examples = tags.made(count)
        sizes = {"embedding": EMBEDDING, "hidden": HIDDEN, "middle": MIDDLE}
        return bilstm_tagger.tagger(examples, name == "bilstm_character_tagger", **sizes), examples
    if name == "graph_net":
        return graph_net.GraphNet(HIDDEN, LAYERS), molecules.made(count)
    examples = dependencies.made(count)
    words = dynamic_training.numbered([word for sentence in examples for word, _ in sentence])
    return biaffine_parser.Parser(words, EMBEDDING, HIDDEN, SCORE), examples


def _over_words(net_class: Any, words: Sequence[str]) -> Any:
    vocabulary = dynamic_training.numbered(words)
    net = net_class(len(vocabulary) + 1, EMBEDDING, HIDDEN)
    net.vocabulary = vocabulary
    return net


def numbers(name: str, net: Any, examples: Sequence[Any]) -> dict[str, Any]:
    """Examples without words: a tree, `[words, label]`, `[words, spellings, tags]`, a molecule, or `[words, heads]`."""
    if name in {"tree_lstm", "rvnn"}:

        def tree(given: Any) -> list[Any]:
            if len(given) == 2:
                return [given[0], net.vocabulary[given[1]]]
            return [given[0], tree(given[1]), tree(given[2])]

        return {"words": len(net.vocabulary) + 1, "examples": list(map(tree, examples))}
    if name in {"td_rnn", "td_lstm"}:
        rows = [[[net.vocabulary[word] for word in text.split()], label] for text, label in examples]
        return {"words": len(net.vocabulary) + 1, "examples": rows}
    if name.startswith("bilstm"):
        characters = getattr(net, "characters", {})
        rows = [
            [
                [net.words.get(word, 0) for word, _ in sentence],
                [[characters.get(each, 0) for each in word] for word, _ in sentence],
                net.labels(sentence),
            ]
            for sentence in examples
        ]
        sizes = {"words": len(net.words) + 1, "tags": len(net.tags) + 1, "characters": len(characters) + 1}
        return {**sizes, "examples": rows}
    if name == "graph_net":
        rows = [
            {
                "features": each.features.tolist(),
                "near": each.neighbours,
                "label": each.label,
            }
            for each in examples
        ]
        return {"features": molecules.FEATURES, "layers": LAYERS, "examples": rows}
    rows = [[[1, *(net.words[word] + 1 for word, _ in each)], [head for _, head in each]] for each in examples]
    return {"words": len(net.words) + 2, "score": SCORE, "examples": rows}
