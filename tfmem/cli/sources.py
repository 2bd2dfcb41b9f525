"""What a command line names as a model: a SavedModel, a `.keras` file, or `module:name` of a program."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from graph_passes.errors import GraphError

FORMS = "a SavedModel, a .keras file, or module:name of a compiled model or a tf.function"


def model_of(source: str) -> Any:
    """The object that `source` names.

    Raises:
        GraphError: there is none.
    """
    path = Path(source)
    if path.is_dir():
        return path
    if path.suffix == ".keras":
        if not path.is_file():
            raise GraphError(f"'{path}' does not exist; expected {FORMS}")
        import keras

        return keras.models.load_model(path)
    module, colon, name = source.partition(":")
    if not colon or not name:
        raise GraphError(f"'{source}' does not exist, and is not module:name; expected {FORMS}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    module = module.removesuffix(".py").replace("/", ".")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks another one
        raise GraphError(
            f"there is no module '{module}' in '{Path.cwd()}' or on Python's path; expected {FORMS}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise GraphError(f"module '{module}' has no '{name}'; there are: {', '.join(_public(found))}")
        found = getattr(found, part)
    is_maker = callable(found) and not hasattr(found, "get_concrete_function") and not hasattr(found, "fit")
    return found() if is_maker else found  # a function that makes the model


def _public(module: Any) -> list[str]:
    return sorted(name for name in vars(module) if name.isidentifier() and name[0] != "_")[:20]
