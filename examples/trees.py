"""Trees of sentences with a sentiment from 0 to 4 at each node: read from a file, or made from a small grammar."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

# (label, word) or (label, left, right)
Tree = tuple[int, str] | tuple[int, "Tree", "Tree"]

_WORDS = {
    0: ("awful", "dreadful", "unbearable"),
    1: ("dull", "clumsy", "bland", "tedious"),
    3: ("funny", "warm", "clever", "fresh"),
    4: ("brilliant", "gripping", "superb"),
}
_THINGS = ("film", "movie", "story", "script", "acting", "ending", "plot", "music")


def read(path: str | Path) -> list[Tree]:
    """The trees of a file of the Stanford Sentiment Treebank, a line each: `(4 (2 A) (4 triumph))`.

    Raises:
        ValueError: a line is no binary tree.
        OSError: there is no such file.
    """
    trees = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            words = re.findall(r"[()]|[^() \n]+", line)
            try:
                trees.append(_parsed(words))
            except (IndexError, ValueError):
                raise ValueError(f"{path}:{number} is no binary tree with labels: '{line.strip()[:60]}'") from None
            if words:
                raise ValueError(f"{path}:{number} goes on behind its tree: '{line.strip()[:60]}'")
    return trees


def _parsed(words: list[str]) -> Tree:
    """The tree at the beginning of `words`, which are taken from them."""
    if words.pop(0) != "(":
        raise ValueError
    label = int(words.pop(0))
    tree: Tree = (label, _parsed(words), _parsed(words)) if words[0] == "(" else (label, words.pop(0))
    if words.pop(0) != ")":
        raise ValueError
    return tree


def made(count: int, seed: int = 0) -> list[Tree]:
    """Sentences about films: "not" reverses a sentiment, and only the part after "but" counts."""
    random = np.random.default_rng(seed)
    return [_sentence(random) for _ in range(count)]


def _sentence(random: np.random.Generator) -> Tree:
    clause = _clause(random)
    while random.random() < 0.4:
        after = _clause(random)
        clause = (after[0], clause, (after[0], (2, "but"), after))
    return (clause[0], clause, (2, "."))


def _clause(random: np.random.Generator) -> Tree:
    label = int(random.choice(list(_WORDS)))
    phrase: Tree = (label, str(random.choice(_WORDS[label])))
    if random.random() < 0.3:
        phrase = (4 - label, (2, "not"), phrase)
    subject: Tree = (2, (2, "the"), (2, str(random.choice(_THINGS))))
    return (phrase[0], subject, (phrase[0], (2, "is"), phrase))
