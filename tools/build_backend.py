"""setuptools' build backend, and a TensorFlow to build against where the target has none.

`pip install .` builds in an isolated environment. If the target environment has a TensorFlow that
tfmem runs on, the library is built against that one. If not, pip is about to install one for tfmem,
so the same requirement is added to the build: pip resolves both to the same release.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from find_tensorflow import TensorFlowNotFoundError, find_tensorflow
from packaging.requirements import Requirement
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - the other hooks are setuptools' own


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + _tensorflow_to_build_with()


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + _tensorflow_to_build_with()


def _tensorflow_to_build_with() -> list[str]:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    requirements = [Requirement(text) for text in project["dependencies"]]
    needed = next(requirement for requirement in requirements if requirement.name == "tensorflow")
    try:
        installed = find_tensorflow().__version__
    except TensorFlowNotFoundError:
        return [str(needed)]
    return [] if needed.specifier.contains(installed, prereleases=True) else [str(needed)]
