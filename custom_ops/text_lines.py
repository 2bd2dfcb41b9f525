"""Text in lines of words, the form in which ops take cells, programs, regions, kinds of nodes and kernels.

The first line names the format and its version. `ops/text_reader.h` reads the same on the op library's side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from custom_ops.errors import TfmemError


def line(*words: object) -> str:
    """Words of a line, separated by a space."""
    return " ".join(map(str, words))


def joined(form: str, lines: Iterable[str]) -> str:
    """Write a text of the format `form`, which ends in a line break."""
    return "\n".join([form, *lines]) + "\n"


def read_lines(text: str, form: str, what: str, error: type[TfmemError], read: Callable[[str], None]) -> None:
    """Hand each line behind the first that is not empty to `read`.

    Args:
        what: what the text is, for messages.
        error: what is raised if the first line is another, or where `read` raises something that is no TfmemError.
    """
    first, *lines = text.split("\n")
    if first != form:
        raise error(f"expected '{form}' on the first line, found '{first[:40]}'")
    for number, found in enumerate(lines, 2):
        if not found:
            continue
        try:
            read(found)
        except (ValueError, LookupError, TypeError) as problem:
            raise error(f"cannot read line {number} of {what}, '{found[:80]}': {problem}") from problem


def decoded(text: bytes | str) -> str:
    """Decode a text that an attribute holds: TensorFlow gives bytes, a pass writes either."""
    return text.decode() if isinstance(text, bytes) else text
