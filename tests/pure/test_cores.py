"""Cores that a process may use, from fake files of the system."""

import os

import pytest

from custom_ops.jit.cores import usable_cores


@pytest.fixture(name="system")
def fixture_system(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)

    def write(files):
        for name, content in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        return tmp_path

    return write


V1 = "sys/fs/cgroup/cpu"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"sys/fs/cgroup/cpu.max": "1000 100000\n"}, 1),
        ({"sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 8),
        ({"sys/fs/cgroup/cpu.max": "nonsense"}, 8),
        ({"sys/fs/cgroup/cpu.max": "100000 0"}, 8),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "300000 100000"}, 3),  # above its own
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "300000 100000"}, 3),
        ({"proc/self/cgroup": "0::/elsewhere\n", "sys/fs/cgroup/cpu.max": "500000 100000"}, 5),  # a container
        ({f"{V1}/cpu.cfs_quota_us": "-1\n", f"{V1}/cpu.cfs_period_us": "100000\n"}, 8),
        ({f"{V1}/cpu.cfs_quota_us": "400000\n", f"{V1}/cpu.cfs_period_us": "100000\n"}, 4),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/x\n3:memory:/y\n",
                f"{V1}/x/cpu.cfs_quota_us": "100000",
                f"{V1}/x/cpu.cfs_period_us": "50000",
                f"{V1}/y/cpu.cfs_quota_us": "1",
                f"{V1}/y/cpu.cfs_period_us": "1",
            },
            2,
        ),
        ({"proc/self/cgroup": "0::/../../..\n", "cpu.max": "1 1"}, 8),
    ],
)
def test_quotas(system, files, cores):
    assert usable_cores(system(files)) == cores


def test_affinity(system, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5})
    assert usable_cores(system({})) == 2
    assert usable_cores(system({"sys/fs/cgroup/cpu.max": "100000 100000\n"})) == 1


def test_this_machine_has_one():
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
