"""Sentences whose words have a head each: read from a file of CoNLL-U, or made from a small grammar."""

from __future__ import annotations

from pathlib import Path

import numpy as np

Sentence = list[tuple[str, int]]  # words, and the position of each word's head from 1 on; 0: the root

MOST_WORDS = 21
_NOUNS = ("dog", "cat", "teacher", "painter", "river", "city", "letter", "song")
_VERBS = ("sees", "likes", "finds", "paints", "follows", "hears")
_ADJECTIVES = ("old", "small", "green", "quiet", "famous")
_PREPOSITIONS = ("near", "with", "in", "behind")
_ADVERBS = ("often", "never", "slowly", "today")


def read(path: str | Path) -> list[Sentence]:
    """The sentences of a file in the format CoNLL-U that have at most `MOST_WORDS` words.

    Raises:
        ValueError: a line has no word or no head, or the file no sentence.
        OSError: there is no such file.
    """
    sentences: list[Sentence] = []
    words: Sentence = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate([*lines, "\n"], start=1):
            fields = line.rstrip("\n").split("\t")
            if not line.strip():
                if words and len(words) <= MOST_WORDS:
                    sentences.append(words)
                words = []
            elif not line.startswith("#") and fields[0].isdigit():
                if len(fields) < 7 or not fields[6].isdigit():
                    raise ValueError(f"{path}:{number}: '{line.strip()[:60]}' has no head in its seventh field")
                words.append((fields[1].lower(), int(fields[6])))
    if not sentences:
        raise ValueError(f"'{path}' has no sentence of at most {MOST_WORDS} words")
    return sentences


def made(count: int, seed: int = 0) -> list[Sentence]:
    """Sentences with phrases that hang on a noun or on the verb, as their prepositions and adverbs say."""
    random = np.random.default_rng(seed)
    return [_sentence(random) for _ in range(count)]


def _sentence(random: np.random.Generator) -> Sentence:
    words: list[str] = []
    heads: list[int] = []

    def put(word: str, head: int) -> int:
        words.append(word)
        heads.append(head)
        return len(words)

    def phrase(head: int, depth: int = 0) -> int:
        """A noun phrase; returns the position of its noun."""
        waiting = [put("the", -1)]
        waiting += [put(str(random.choice(_ADJECTIVES)), -1) for _ in range(int(random.integers(3)))]
        noun = put(str(random.choice(_NOUNS)), head)
        for word in waiting:
            heads[word - 1] = noun
        if depth == 0 and random.random() < 0.4:
            place = str(random.choice(_PREPOSITIONS))
            hung = put(place, noun)
            phrase(hung, 1)
        return noun

    subject = phrase(-1)
    early = put(str(random.choice(_ADVERBS)), -1) if random.random() < 0.3 else 0
    verb = put(str(random.choice(_VERBS)), 0)
    for word in (subject, early):
        if word:
            heads[word - 1] = verb
    phrase(verb)
    if random.random() < 0.3:
        put(str(random.choice(_ADVERBS)), verb)
    return list(zip(words, heads, strict=True))
