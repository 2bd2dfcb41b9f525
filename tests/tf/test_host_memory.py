"""What the op library takes the host's memory for, from fake files of the system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import tfmem
from custom_ops.load import UNKNOWN_MEMORY, HostMemory
from tfmem.devices import cpu_memory, find_target

MACHINE = {"proc/meminfo": "MemTotal:  1000 kB\nMemFree:  1 kB\nMemAvailable:  800 kB\n"}
KIB = 1 << 10
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
NONE = "9223372036854771712\n"  # how version 1 says that there is no limit


def version_1(folder: str, limit: int | str, usage: int, cache: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{usage}\n",
        f"{folder}/memory.stat": f"cache 77\ninactive_file 3\ntotal_inactive_file {cache}\n",
    }


def version_2(folder: str, limit: int | str, usage: int, cache: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{usage}\n",
        f"{folder}/memory.stat": f"anon 5\nfile 99\ninactive_file {cache}\nactive_file 4\n",
    }


CASES = {
    "nothing": ({}, UNKNOWN_MEMORY, UNKNOWN_MEMORY),
    "machine": (MACHINE, 800 * KIB, 1000 * KIB),
    "group 2": (MACHINE | version_2(V2, 5000, 3000, 500), 2500, 5000),
    "group 2 without limit": (MACHINE | version_2(V2, "max", 3000, 500), 800 * KIB, 1000 * KIB),
    "group 2 above the machine": (MACHINE | version_2(V2, 1 << 40, 3000), 800 * KIB, 1000 * KIB),
    "group 2 over its limit": (MACHINE | version_2(V2, 5000, 9000, 100), 0, 5000),
    "group 2 with more cache than usage": (MACHINE | version_2(V2, 5000, 100, 900), 5000, 5000),
    "group 2 without statistics": (
        MACHINE | {f"{V2}/memory.max": "5000\n", f"{V2}/memory.current": "10\n"},
        4990,
        5000,
    ),
    "group 2 without usage": (MACHINE | {f"{V2}/memory.max": "5000\n"}, 800 * KIB, 5000),
    "a separate group": (
        MACHINE | {"proc/self/cgroup": "0::/a/b\n"} | version_2(f"{V2}/a/b", 5000, 1000),
        4000,
        5000,
    ),
    "a group above": (
        MACHINE
        | {"proc/self/cgroup": "0::/a/b\n"}
        | version_2(f"{V2}/a/b", 6000, 1000)
        | version_2(f"{V2}/a", 5000, 4900),
        100,
        5000,
    ),
    "a container's path is the host's": (
        MACHINE | {"proc/self/cgroup": "0::/docker/1234\n"} | version_2(V2, 5000, 1000),
        4000,
        5000,
    ),
    "group 1": (MACHINE | version_1(V1, 5000, 3000, 500), 2500, 5000),
    "group 1 without limit": (MACHINE | version_1(V1, NONE, 3000, 500), 800 * KIB, 1000 * KIB),
    "a separate group 1": (
        MACHINE
        | {"proc/self/cgroup": "4:cpu,memory:/x/y\n3:cpu:/z\n0::/\n"}
        | version_1(f"{V1}/x/y", 5000, 3000)
        | version_1(f"{V1}/z", 10, 3),
        2000,
        5000,
    ),
    "group 1 above": (
        MACHINE | {"proc/self/cgroup": "4:memory:/x/y\n"} | version_1(f"{V1}/x", 5000, 4000),
        1000,
        5000,
    ),
    "nonsense": (
        MACHINE | {"proc/self/cgroup": "x\n::\n4:memory\n", f"{V2}/memory.max": "many\n", f"{V1}/memory.stat": "\n"},
        800 * KIB,
        1000 * KIB,
    ),
    "more than 64 bits": (MACHINE | version_2(V2, "18446744073709551616", 1), 800 * KIB, 1000 * KIB),
}


@pytest.mark.parametrize(("files", "available", "limit"), CASES.values(), ids=CASES)
def test_memory_within_machine_and_groups(files: dict[str, str], available: int, limit: int, tmp_path: Path) -> None:
    for name, content in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert tfmem.load_ops().host_memory(str(tmp_path)) == (available, limit)


def test_this_machine() -> None:
    found = tfmem.load_ops().host_memory()
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < found.available < found.limit <= machine


def test_the_memory_of_a_cpu_is_within_its_group() -> None:
    class Library:
        def host_memory(self) -> HostMemory:
            return HostMemory(3000, 5000)

    assert cpu_memory(Library()) == 5000
    assert find_target("CPU:0", tfmem.load_ops()).memory == tfmem.load_ops().host_memory().limit
    with pytest.raises(tfmem.InvalidBudgetError, match="the device has"):
        tfmem.optimize(tfmem.load_ops, memory_budget=tfmem.load_ops().host_memory().limit + 1, device="CPU:0")
