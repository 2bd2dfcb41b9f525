"""Sentences with a sentiment: read from a file, or made from a small grammar. Nothing is downloaded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

Sentence = tuple[str, int]  # text, and 1 for a positive one or 0 for a negative one

_LABELS = {"0": 0, "1": 1, "negative": 0, "positive": 1}
_NEUTRAL = 2  # of the treebank's 0 (very negative) to 4 (very positive)
_LEAF = re.compile(r"\(\d ([^()\s]+)\)")
_ESCAPES = {"-LRB-": "(", "-RRB-": ")", "\\/": "/", "\\*": "*"}

_GOOD = (
    "moving",
    "funny",
    "warm",
    "clever",
    "gripping",
    "fresh",
    "honest",
    "beautiful",
    "brilliant",
    "charming",
    "tender",
    "sharp",
)
_BAD = (
    "dull",
    "clumsy",
    "flat",
    "tedious",
    "hollow",
    "predictable",
    "lifeless",
    "sloppy",
    "shallow",
    "grating",
    "bland",
    "messy",
)
_THINGS = (
    "film",
    "movie",
    "story",
    "script",
    "acting",
    "ending",
    "dialogue",
    "direction",
    "cast",
    "plot",
    "music",
    "first half",
)
_DEGREES = ("", "very ", "truly ", "rather ", "quite ", "simply ")


def read(path: str | Path) -> tuple[list[Sentence], list[Sentence]]:
    """Sentences to train on and sentences to test with.

    Args:
        path: a file, of which every tenth sentence is kept for the test, or a folder with `train.txt` and `dev.txt`.
            A line is a tree of the Stanford Sentiment Treebank, such as `(4 (2 A) (4 triumph))`, whose root's label
            counts (neutral sentences are left out); or a sentence and a label with a tab between them, in either order;
            labels are 0 or negative, 1 or positive.

    Raises:
        ValueError: a line is neither, or one of the labels is missing altogether.
        OSError: there is no such file.
    """
    path = Path(path)
    if path.is_dir():
        return _parsed(path / "train.txt"), _parsed(path / "dev.txt")
    sentences = _parsed(path)
    return [s for i, s in enumerate(sentences) if i % 10], sentences[::10]


def made(count: int, seed: int = 0) -> list[Sentence]:
    """Sentences about films whose sentiment depends on the order of words: "not dull", "dull at first, but ..."."""
    random = np.random.default_rng(seed)
    return [_made(random) for _ in range(count)]


def _parsed(path: Path) -> list[Sentence]:
    sentences = list(_parse_lines(path))
    if len({label for _, label in sentences}) < 2:
        raise ValueError(f"'{path}' has {len(sentences)} sentences, but not both positive and negative ones")
    return sentences


def _parse_lines(path: Path) -> Iterable[Sentence]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(map(str.strip, lines), start=1):
            if line.startswith("("):
                root, words = line[1:2], _LEAF.findall(line)
                if not root.isdigit() or not words:
                    raise ValueError(f"{path}:{number} is no sentiment tree: '{line[:60]}'")
                if int(root) != _NEUTRAL:
                    yield _unescaped(" ".join(words)), int(int(root) > _NEUTRAL)
            elif line:
                columns = line.split("\t")
                labels = [column for column in columns if column.lower() in _LABELS]
                if len(columns) == 2 and len(labels) == 1:
                    (text,) = (column for column in columns if column is not labels[0])
                    yield text, _LABELS[labels[0].lower()]
                elif number > 1:  # the first line may be a header
                    raise ValueError(
                        f"{path}:{number} is neither a sentiment tree nor a sentence and its label (0, 1, negative or "
                        f"positive) with a tab between them: '{line[:60]}'"
                    )


def _unescaped(text: str) -> str:
    for escape, character in _ESCAPES.items():
        text = text.replace(escape, character)
    return text


def _made(random: np.random.Generator) -> Sentence:
    def clause(label: int) -> str:
        negated = random.random() < 0.3
        words = _GOOD if label != negated else _BAD
        thing, degree, word = random.choice(_THINGS), random.choice(_DEGREES), random.choice(words)
        return f"the {thing} is {'not ' if negated else ''}{degree}{word}"

    label = int(random.integers(2))
    match random.integers(4):
        case 0:
            return clause(label) + " .", label
        case 1:
            return f"{clause(label)} and {clause(label)} .", label
        case 2:
            return f"{clause(1 - label)} , but {clause(label)} , and that is what stays .", label
        case _:
            return f"{clause(label)} , even though {clause(1 - label)} .", label
