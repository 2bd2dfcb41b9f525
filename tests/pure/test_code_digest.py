"""The digest of tfmem's code and of its profiles of devices: what is on disk under another one is not taken."""

from __future__ import annotations

from custom_ops import code_digest


def test_the_digest_holds_code_and_profiles() -> None:
    names = {name for name, _ in code_digest._files()}
    assert {"custom_ops/code_digest.py", "graph_passes/pipeline.py", "tfmem/api.py"} <= names
    assert {"custom_ops/devices/cpu.json", "custom_ops/devices/h200.json"} <= names


def test_another_number_in_a_file_is_another_digest() -> None:
    assert code_digest.digest_of([("a", b"1")]) != code_digest.digest_of([("a", b"2")])
    assert code_digest.digest_of([("a", b"1"), ("b", b"")]) == code_digest.digest_of([("b", b""), ("a", b"1")])
