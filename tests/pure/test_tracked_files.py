"""What git keeps is text that people wrote: no links, no binaries but pictures of the docs, nothing large."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LARGEST = 1 << 20  # bytes
PICTURES = (".png",)
TEXT = "100644", "100755"  # git's modes of files; a link has another


@pytest.fixture(name="tracked", scope="module")
def fixture_tracked() -> list[tuple[str, Path]]:
    """Mode and path of each file that git keeps."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no checkout of git")
    command = ["git", "-C", str(ROOT), "ls-files", "-s", "-z"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True).stdout
    entries = (entry.partition("\t") for entry in found.split("\0") if entry)
    return [(facts.split()[0], ROOT / name) for facts, _, name in entries]


def test_git_keeps_files_and_no_links(tracked: list[tuple[str, Path]]) -> None:
    assert tracked
    assert [path for mode, path in tracked if mode not in TEXT] == []


def test_git_keeps_no_large_files_and_no_binaries(tracked: list[tuple[str, Path]]) -> None:
    files = [path for _, path in tracked if path.is_file()]
    assert [path for path in files if path.stat().st_size > LARGEST] == []
    assert [path for path in files if path.suffix not in PICTURES and b"\0" in path.read_bytes()] == []
