"""Documentation, docstrings and comments avoid words that a new reader stumbles over (CONTRIBUTING.md, "Writing")."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "docs").is_dir():
    pytest.skip("the documentation is not installed; run from a checkout", allow_module_level=True)

BANNED = re.compile(r"\b(nobody|whoever|somebody|anew|of (?:its|their|his) own|as it was)\b", re.IGNORECASE)
OPENING = re.compile(r"\s*(Of|The same|That|Those|With|As|And|Whose)\b")
UNNAMED = re.compile(r"(Of|The same|That of|Those|Whose|And)\b")  # comments may be clauses, "As in TensorFlow: ..."
MOST_WORDS = 25  # of a sentence, or of its part before a colon or a semicolon
COMMENT = re.compile(r"^[ \t]*(#|//) ")
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
TEXTS = {".md", ".py", ".cc", ".h", ".cuh", ".toml"}
CODE = ("custom_ops", "graph_passes", "tfmem", "examples", "tools", "benchmarks")
QUOTES = {
    ROOT / "tests/pure" / f"test_{name}.py" for name in ("words", "refusals", "fusion_benchmark")
}  # quote banned words
QUOTED = re.compile(r"^<!-- fusion: begin -->$.*?^<!-- fusion: end -->$", re.MULTILINE | re.DOTALL)  # stored reports


def files() -> list[Path]:
    """All product code, its build, its tests, and all documentation."""
    found = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        ROOT / "setup.py",
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
    ]
    found += [file for folder in (*CODE, "tests") for file in (ROOT / folder).rglob("*") if file.suffix in TEXTS]
    return sorted(file for file in set(found) - QUOTES if file.is_file())


def banned_words(text: str) -> list[str]:
    """The banned words of a text, also those that a line break divides."""
    return BANNED.findall(re.sub(r"\s+(?:#|//)?\s*", " ", QUOTED.sub("", text)))


def opening(file: Path) -> re.Pattern[str]:
    """The openings that name nothing: in tests, whose names say what they hold, those that never do."""
    return UNNAMED if ROOT / "tests" in file.parents else OPENING


def docstrings(file: Path) -> Iterator[str]:
    """The docstrings of a module, its classes and its functions."""
    waiting: list[ast.AST] = [ast.parse(file.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node, clean=False) or ""
        waiting += [each for block in BLOCKS for each in getattr(node, block, ())]  # expressions hold no docstring


def comments(text: str) -> Iterator[str]:
    """The first line of each comment that stands on lines of its kind alone, without its mark."""
    before = False
    for line in text.splitlines():
        is_comment = COMMENT.match(line) is not None
        if is_comment and not before:
            yield COMMENT.sub("", line)
        before = is_comment


def sentences(text: str) -> Iterator[str]:
    """The sentences and clauses of a page, without its tables, headings, code and outputs."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    lines = (line for line in text.split("\n") if not line.startswith(("    ", "|", "#")))
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", "\n".join(lines)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", part)
        plain = re.sub(r"`[^`]*`", "code", plain).replace("**", "")
        yield from re.split(r"(?<=[.!?:;])\s+", plain.strip())


def words(sentence: str) -> int:
    """The number of words; a name in code or a number is one."""
    return sum(any(map(str.isalnum, word)) for word in sentence.split())


def test_texts_avoid_the_banned_words() -> None:
    found = {file.relative_to(ROOT).as_posix(): banned_words(file.read_text()) for file in files()}
    assert {name: words for name, words in found.items() if words} == {}, "say who does what: see CONTRIBUTING.md"


def test_docstrings_open_with_a_noun_or_a_verb() -> None:
    found = {
        file.relative_to(ROOT).as_posix(): [text for text in docstrings(file) if opening(file).match(text)]
        for file in files()
        if file.suffix == ".py"
    }
    assert {name: texts for name, texts in found.items() if texts} == {}, "name what it returns, or say what it does"


def test_comments_open_with_a_noun_or_a_verb() -> None:
    found = {
        file.relative_to(ROOT).as_posix(): [line for line in comments(file.read_text()) if UNNAMED.match(line)]
        for file in files()
        if file.suffix != ".md" and ROOT / "tests" not in file.parents
    }
    assert {name: lines for name, lines in found.items() if lines} == {}, "name what follows, or say what it does"


def test_sentences_of_the_docs_are_short() -> None:
    pages = [
        *ROOT.glob("docs/**/*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    ]
    found = {
        page.relative_to(ROOT).as_posix(): long
        for page in pages
        if not page.name.startswith("benchmarks")
        and (long := [each for each in sentences(page.read_text()) if words(each) > MOST_WORDS])
    }
    assert found == {}, "one idea in a sentence"


def test_a_banned_word_is_found_across_lines_and_an_opening_at_the_start() -> None:
    assert banned_words("left as it\n    # was, for no\nbody") == ["as it was"]
    assert banned_words("<!-- fusion: begin -->\nleft as it was\n<!-- fusion: end -->\n") == []
    assert OPENING.match("Of a thread.")
    assert OPENING.match("The same for others.")
    assert not OPENING.match("The samples of a batch.")
    assert list(comments("a\n  # Of all.\n  # Of none.\nb\n// Those.\n")) == ["Of all.", "Those."]
    assert list(comments("a  # Of all.\n")) == []


def test_sentences_and_their_words_are_counted() -> None:
    page = "# A title.\n\nOne `a b`: two [of three](x.md).\n- **Four.** Five\n  six\n\n    code of seven\n|eight|\n"
    assert [each for each in sentences(page) if each] == ["One code:", "two of three.", "- Four.", "Five\n  six"]
    assert [words(each) for each in ("- Four.", "1.5 to 2 us", "a, b - c")] == [1, 4, 3]
