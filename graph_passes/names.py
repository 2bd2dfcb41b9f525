"""Names of functions as their users wrote them."""

from __future__ import annotations

import re
from collections.abc import Iterable

_OF_TENSORFLOW = re.compile(r"__(?:inference|forward|backward)_(?:signature_wrapper_)?(.+?)_\d+")
_OF_PIECE = re.compile(r"tfmem/split_(\d+)/(\d+)/")
_NUMBER = re.compile(r"_\d+$")


def spoken(name: str) -> str:
    """The user's name of a function that TensorFlow calls `name`: "train" for "__inference_train_23"."""
    found = _OF_TENSORFLOW.fullmatch(name)
    return found[1] if found else name


def suffix_of(scope: str, names: Iterable[str]) -> str:
    """What Keras puts behind the names of a model's layers when it traces the model: "_1" mostly, or "".

    Args:
        scope: the model's name.
        names: of ops.
    """
    pattern = re.compile(rf"(?:^|/){re.escape(scope)}(_\d+)?/")
    return next((found[1] or "" for name in names if (found := pattern.search(name))), "")


def part_of(name: str) -> int:
    """The part of the step, split along the batch, that an op belongs to; -1 for an op that runs whole."""
    found = _OF_PIECE.match(name)
    return int(found[1]) if found else -1


def plain(name: str, suffix: str) -> str:
    """An op's name with its layers as the user named them: "net/conv/Relu" for "net_1/conv_1/Relu", and for a piece.

    Args:
        name: of an op, or of a tensor.
        suffix: of the model's name; where it has one, each layer has a number, too, and not always the same.
    """
    if found := _OF_PIECE.match(name):
        return f"piece {int(found[2]) + 1}/{plain(name[found.end() :], suffix)}"
    if not suffix:
        return name
    *scopes, op = name.split("/")
    return "/".join([*(_NUMBER.sub("", scope) for scope in scopes), op])
