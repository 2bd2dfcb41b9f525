"""Profiles on disk."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from custom_ops.jit.cache import CHECKSUM, Cache, digest
from graph_passes.analysis.memory.observe import Observation
from tfmem.runtime.profile_cache import FORMAT, ProfileCache

SEEN = Observation({"a": 1.0, "b": 0.0}, {"a": 5, "b": -70}, 130, 1.0, 200, (("a", 200), ("b", 150)))
OPS = ("a", "b")
MOST = 10_000


def place(folder: Path, key: str = "key") -> Path:
    return Cache(folder / "profiles").place(key)


def load(folder: Path, in_use: int = 100) -> Observation | None:
    return ProfileCache(str(folder)).load("key", in_use, OPS, MOST)


def put(folder: Path, content: str | bytes) -> Path:
    file = place(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def stored(folder: Path) -> dict[str, Any]:
    ProfileCache(str(folder)).store("key", SEEN, in_use=100)
    values: dict[str, Any] = json.loads(place(folder).read_bytes()[CHECKSUM:])
    return values


def signed(values: Any) -> str:
    """As an attacker would write it."""
    text = json.dumps(values)
    return digest("key", text) + text


def test_a_profile_is_found_again_with_the_base_of_the_process_that_asks(tmp_path: Path) -> None:
    cache = ProfileCache(str(tmp_path))
    cache.store("key", SEEN, in_use=100)
    assert load(tmp_path) == SEEN
    found = load(tmp_path, in_use=1000)
    assert found is not None
    assert found.base == 1030
    assert (found.seconds, found.workspace, found.curve) == (SEEN.seconds, SEEN.workspace, SEEN.curve)
    assert cache.load("another", 0, OPS, MOST) is None


NONE: list[str | bytes] = ["", "[]", "null", "3", '{"base": 1}', '{"base": null, "curve": []}', "NaN", "1" * 5000]
NONE += ['{"seconds": {}}', "[" * 200_000, '{"seconds":' * 200_000]
NONE += [b"\xff\xfe", b"\0" * 100]


@pytest.mark.parametrize("text", NONE, ids=range(len(NONE)))
def test_what_is_no_profile_is_as_if_it_were_not_there(text: str | bytes, tmp_path: Path) -> None:
    for content in (text, digest("key", text).encode() + (text if isinstance(text, bytes) else text.encode())):
        put(tmp_path, content)
        assert load(tmp_path) is None


def test_a_flipped_digit_is_seen(tmp_path: Path) -> None:
    stored(tmp_path)
    file = place(tmp_path)
    text = file.read_text()
    file.write_text(text.replace("130", "131"))
    assert text != file.read_text()
    assert load(tmp_path) is None
    other = place(tmp_path, "keyed")  # another step's
    put(tmp_path, text).rename(other)
    assert ProfileCache(str(tmp_path)).load("keyed", 0, OPS, MOST) is None


WRONG = [None, True, "1", [], {}, math.nan, math.inf, -math.inf, 1e300, 10**12, -(10**12), 1 << 80, -1.5]


@pytest.mark.parametrize("field", ["base", "peak", "step_seconds", "in_use", "seconds", "workspace", "curve"])
@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_no_value_is_believed_that_no_step_could_have_measured(field: str, wrong: Any, tmp_path: Path) -> None:
    values = stored(tmp_path)
    put(tmp_path, signed(values))
    assert load(tmp_path) == SEEN
    put(tmp_path, signed({**values, field: wrong}))
    assert load(tmp_path) is None
    if field in ("seconds", "workspace"):
        put(tmp_path, signed({**values, field: {**values[field], "a": wrong}}))
        assert load(tmp_path) is None
    if field == "curve":
        for curve in ([["a", wrong]], [wrong], [[wrong, 200]]):
            put(tmp_path, signed({**values, field: curve}))
            assert load(tmp_path) is None


@pytest.mark.parametrize("ops", [(), ("a",), ("a", "b", "c"), ("a", "c")])
def test_a_profile_is_of_the_ops_at_hand(ops: tuple[str, ...], tmp_path: Path) -> None:
    stored(tmp_path)
    assert ProfileCache(str(tmp_path)).load("key", 100, ops, MOST) is None


def test_more_than_the_device_has_is_not_believed(tmp_path: Path) -> None:
    stored(tmp_path)
    assert ProfileCache(str(tmp_path)).load("key", 100, OPS, 199) is None
    assert ProfileCache(str(tmp_path)).load("key", 100, OPS, 200) == SEEN


@pytest.mark.parametrize("make", ["fifo", "folder", "large", "unreadable", "loop", "device"])
def test_files_that_are_none(make: str, tmp_path: Path) -> None:
    file = put(tmp_path, "")
    file.unlink()
    if make == "fifo":
        os.mkfifo(file)
    elif make == "folder":
        file.mkdir()
    elif make == "large":
        with file.open("wb") as sparse:
            sparse.truncate(1 << 40)
    elif make == "unreadable":
        put(tmp_path, "{}").chmod(0)
    elif make == "loop":
        file.symlink_to(file)
    else:
        file.symlink_to("/dev/zero")
    found: list[Observation | None] = [SEEN]
    thread = threading.Thread(target=lambda: found.append(load(tmp_path)), daemon=True)
    thread.start()
    thread.join(20)
    assert found[1:] == [None]  # it does not wait for a writer
    ProfileCache(str(tmp_path)).store("key", SEEN, in_use=100)
    assert load(tmp_path) == SEEN
    assert list(file.parent.iterdir()) == [file]  # nothing is left aside


def test_what_cannot_be_written_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    ProfileCache(str(blocked)).store("key", SEEN, 0)
    ProfileCache("").store("key", SEEN, 0)
    assert ProfileCache("").load("key", 0, OPS, MOST) is None
    nan = Observation({"a": math.nan}, {"a": 5}, 130, 1.0, 200, (("a", 200),))
    ProfileCache(str(tmp_path)).store("key", nan, 0)
    assert not (tmp_path / "profiles").exists()
    assert FORMAT == 4  # files of before lay elsewhere


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3),
    max_leaves=8,
)


@given(changes=st.dictionaries(st.sampled_from([*SEEN.__dict__, "in_use", "more"]), JSON, max_size=3))
def test_whatever_a_file_says_what_is_read_is_possible(changes: dict[str, Any], tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("cache")
    put(folder, signed({**stored(folder), **changes}))
    found = load(folder)
    assert found is None or _possible(found)


@given(offset=st.integers(0, 10_000), byte=st.integers(0, 255), end=st.integers(0, 10_000))
def test_whatever_became_of_a_file(offset: int, byte: int, end: int, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("cache")
    stored(folder)
    content = bytearray(place(folder).read_bytes())
    content[offset % len(content)] = byte
    put(folder, bytes(content[: len(content) - end % 3]))
    assert load(folder) in (None, SEEN)


def _possible(found: Observation) -> bool:
    times = [found.step_seconds, *found.seconds.values()]
    sizes = [found.peak, found.base, *found.workspace.values(), *(size for _, size in found.curve)]
    return (
        set(found.seconds) == set(found.workspace) == set(OPS)
        and all(math.isfinite(time) and 0 <= time <= 1e5 for time in times)
        and all(type(size) is int and abs(size) <= 2 * MOST for size in sizes)
    )
