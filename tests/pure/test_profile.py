"""Profiles on disk."""

from __future__ import annotations

from pathlib import Path

from graph_passes.cost.observe import Observation
from tfmem.profile import ProfileCache

SEEN = Observation({"a": 1.0}, {"a": 5}, 130, 1.0, 200, (("a", 200),))


def test_a_profile_is_found_again_with_the_base_of_the_process_that_asks(tmp_path: Path) -> None:
    cache = ProfileCache(str(tmp_path))
    cache.store("key", SEEN, in_use=100)
    assert cache.load("key", in_use=100) == SEEN
    found = cache.load("key", in_use=1000)
    assert found is not None
    assert found.base == 1030
    assert (found.seconds, found.workspace, found.curve) == (SEEN.seconds, SEEN.workspace, SEEN.curve)
    assert cache.load("another", 0) is None


def test_what_cannot_be_read_or_written_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    cache = ProfileCache(str(tmp_path))
    for text in ("", "[]", '{"base": 1}', '{"base": null, "curve": []}'):
        (tmp_path / "profiles").mkdir(exist_ok=True)
        (tmp_path / "profiles" / "key.json").write_text(text)
        assert cache.load("key", 0) is None
    blocked = tmp_path / "file"
    blocked.write_text("")
    ProfileCache(str(blocked)).store("key", SEEN, 0)
    ProfileCache("").store("key", SEEN, 0)
    assert ProfileCache("").load("key", 0) is None
