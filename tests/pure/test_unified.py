"""The experiments of the thesis's chapter 4, on memory that writes down what it is asked for."""

from __future__ import annotations

import pytest

from benchmarks.offload import unified


class Written:
    """Memory that does nothing; what was asked for since the last `free_all`, in order."""

    size = 1 << 20

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._count = 0

    def allocate(self) -> int:
        self._count += 1
        return self._count

    def free_all(self) -> None:
        self.calls.append("free")
        self._count = 0

    def to_device(self, buffer: int, stream: int) -> None:
        self.calls.append(f"{buffer} to GPU on {stream}")

    def to_host(self, buffer: int, stream: int) -> None:
        self.calls.append(f"{buffer} to host on {stream}")

    def advise_host(self, buffer: int) -> None:
        self.calls.append(f"advise {buffer}")

    def touch(self, buffer: int) -> None:
        self.calls.append(f"touch {buffer}")

    def compute(self, read: int, written: int, stream: int) -> None:
        self.calls.append(f"{read} -> {written} on {stream}")

    def wait(self, stream: int | None = None) -> None:
        self.calls.append("wait" if stream is None else f"wait for {stream}")


FIRST = ["1 to GPU on 0", "2 to GPU on 0", "wait", "1 -> 2 on 0"]


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("migration_first", [*FIRST, "wait for 0", "1 to host on 0", "2 -> 3 on 1", "wait"]),
        ("kernel_first", [*FIRST, "wait", "2 -> 3 on 1", "1 to host on 0", "wait for 1"]),
        ("both", [*FIRST, "wait", "1 to host on 0", "3 to GPU on 1", "2 -> 3 on 1", "wait"]),
    ],
)
def test_an_experiment_is_its_listing(name: str, calls: list[str]) -> None:
    memory = Written()
    (case,) = [case for case in unified.CASES if case.name == name]
    case.run(memory)
    assert memory.calls == calls


def test_the_table_has_all_experiments_and_the_rates() -> None:
    memory, cases = Written(), {}
    for case in unified.CASES:
        cases[case.name] = {"mib": 1, "ms": unified.measured(memory, case)}
        assert memory.calls[-1] == "free"
    rows = unified.table(cases)
    assert [row.split(" | ")[0] for row in rows[-3:]] == ["| rates"] * 3
    assert len(rows) == 2 + 2 + 1 + 1 + 2 + 1 + 3


def test_without_a_gpu_the_command_says_what_it_lacks(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    try:
        from custom_ops.jit.launch import cuda_driver

        cuda_driver()
    except Exception:
        assert unified.main(["--output", str(tmp_path / "none.json")]) == 1
        assert "nothing was measured: GPU kernels need an NVIDIA driver" in capsys.readouterr().err
        assert not (tmp_path / "none.json").exists()
