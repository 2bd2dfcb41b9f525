"""A public class of the product has one meaning: no two modules define one of the same name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("custom_ops", "graph_passes", "tfmem")
ROLES = {
    "Needs",  # what planning takes: every pass has its class
    "Node",  # of a graph: TensorFlow's, and that of an example of a dynamic net, whose class is public
}


def classes(text: str) -> list[str]:
    """Names of the public classes of a module, of those within others, too."""
    found = (node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
    return [name for name in found if not name.startswith("_")]


def repeated(texts: dict[str, str]) -> dict[str, list[str]]:
    """The names that several modules give to a class, with these modules."""
    modules: dict[str, list[str]] = defaultdict(list)
    for module, text in texts.items():
        for name in classes(text):
            modules[name].append(module)
    return {name: found for name, found in modules.items() if len(found) > 1}


def test_no_two_classes_have_one_name() -> None:
    files = [file for layer in LAYERS for file in sorted((ROOT / layer).rglob("*.py"))]
    found = repeated({file.relative_to(ROOT).as_posix(): file.read_text() for file in files})
    assert found.keys() >= ROLES, "a class is gone: remove its name here"
    assert {name: found[name] for name in found.keys() - ROLES} == {}, "name what this class is, beside the others"


def test_a_second_class_of_a_name_is_found() -> None:
    assert repeated(
        {"a.py": "class Move: ...", "b.py": "class Move: ...\nclass _Own: ...", "c.py": "class _Own: ..."}
    ) == {"Move": ["a.py", "b.py"]}
