"""Files of the cache that were sealed, but say what none of their readers expects; and what lies in a file's place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from custom_ops.errors import TfmemWarning
from custom_ops.jit.cache import Cache, UnusableError
from custom_ops.recurrent.search.tune import SweepBench
from custom_ops.timing.tuner import remembered

HUGE = 10**400  # no float holds it
TRIAL = {"point": 1, "predicted": 1.0, "measured": 1.0, "registers": 1, "local": 0, "configuration": {}}


def trials(content: Any) -> Any:
    return remembered(SweepBench.__new__(SweepBench), Cache(Path()), [1]).parse(json.dumps(content).encode())


@pytest.mark.parametrize("content", [HUGE, None, True, "x", [HUGE], {"a": HUGE}, [[]], [{"configuration": HUGE}], [1]])
def test_trials_of_any_content_are_read_or_count_as_not_there(content: Any) -> None:
    with pytest.raises(UnusableError):
        trials(content)


@pytest.mark.parametrize("field", ["predicted", "measured"])
def test_a_time_that_no_float_holds(field: str) -> None:
    assert trials([TRIAL])[0].measured == 1.0
    with pytest.raises(UnusableError):
        trials([TRIAL | {field: HUGE}])


def cache(folder: Path) -> Cache:
    return Cache(folder / "kernels")


def test_an_empty_directory_makes_way(tmp_path: Path) -> None:
    place = cache(tmp_path).place("key")
    place.mkdir(parents=True)
    assert cache(tmp_path).get("key", lambda: b"made") == b"made"
    assert place.is_file()
    assert cache(tmp_path).get("key", lambda: b"made once more") == b"made"


def test_a_full_directory_is_told_of(tmp_path: Path) -> None:
    place = cache(tmp_path).place("key")
    (place / "within").mkdir(parents=True)
    with pytest.warns(TfmemWarning, match="remove what is in its place"):
        assert cache(tmp_path).get("key", lambda: b"made") == b"made"
    assert [path.name for path in place.parent.iterdir()] == [place.name]  # nothing of the attempt is left


def test_a_file_in_place_of_a_folder_is_told_of(tmp_path: Path) -> None:
    place = cache(tmp_path).place("key")
    place.parent.parent.mkdir()
    place.parent.write_text("")
    with pytest.warns(TfmemWarning, match="remove what is in its place"):
        assert cache(tmp_path).get("key", lambda: b"made") == b"made"


def test_a_link_to_a_directory_is_replaced(tmp_path: Path) -> None:
    place = cache(tmp_path).place("key")
    place.parent.mkdir(parents=True)
    place.symlink_to(tmp_path)
    assert cache(tmp_path).get("key", lambda: b"made") == b"made"
    assert not place.is_symlink()
    assert tmp_path.is_dir()
