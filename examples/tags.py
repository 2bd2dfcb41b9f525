"""Sentences with a tag at each word: read from a file, or made from a small grammar. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np

Tagged = list[tuple[str, str]]  # words and their tags

_SYLLABLES = ("ka", "lo", "mi", "ren", "tu", "sol", "bar", "ne", "vi", "dor", "pa", "gin")
_ENDINGS = {"PER": ("son", "sky", "ez"), "LOC": ("ville", "burg", "land"), "ORG": ("soft", "tronics", "bank")}
# A name's tag follows from its spelling, and from words on both of its sides.
_CLAUSES = (
    "PER said that PER left LOC .",
    "the mayor of LOC met PER .",
    "PER works for ORG in LOC .",
    "ORG opened an office near LOC in spring .",
    "shares of ORG fell .",
    "PER , who was born in LOC , runs ORG .",
    "a spokesman of ORG denied it .",
)


def read(path: str | Path) -> list[Tagged]:
    """The sentences of a file, a line each: words with their tags as `word|tag`, separated by spaces.

    Raises:
        ValueError: a word has no tag, or the file no sentence.
        OSError: there is no such file.
    """
    sentences = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            words = [word.rpartition("|")[::2] for word in line.split()]
            for word, tag in words:
                if not word or not tag:
                    raise ValueError(f"{path}:{number}: '{word or tag}' is no word|tag")
            if words:
                sentences.append(words)
    if not sentences:
        raise ValueError(f"'{path}' has no sentence")
    return sentences


def made(count: int, seed: int = 0) -> list[Tagged]:
    """Sentences of one to four clauses about people, places and companies, whose names are rarely met twice."""
    random = np.random.default_rng(seed)
    return [
        [
            _tagged(word, random)
            for clause in random.choice(_CLAUSES, int(random.integers(1, 5)))
            for word in clause.split()
        ]
        for _ in range(count)
    ]


def _tagged(word: str, random: np.random.Generator) -> tuple[str, str]:
    if word not in _ENDINGS:
        return word, "O"
    name = "".join(random.choice(_SYLLABLES, int(random.integers(1, 4)))) + str(random.choice(_ENDINGS[word]))
    return name.capitalize(), f"I-{word}"
