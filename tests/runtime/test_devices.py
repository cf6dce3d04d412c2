from __future__ import annotations

from pathlib import Path

import pytest

from ingot.runtime import control_group, devices


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, float("inf")),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, float("inf")),
        ({"cpu.max": "nonsense\n"}, float("inf")),
        ({}, float("inf")),
    ],
)
def test_a_containers_share_of_time_is_read_of_its_control_group(
    tmp_path: Path, files: dict[str, str], cores: float
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert devices.quota(tmp_path) == cores


def test_the_groups_around_this_process_count(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("5:memory:/job/a\n3:cpu,cpuacct:/absent\n0::/a.slice/b.service\n")
    for name in ("a.slice/b.service", "memory/job/a", "cpu"):
        (tmp_path / "cgroup" / name).mkdir(parents=True)
    root = tmp_path / "cgroup"
    around = [root / "a.slice" / "b.service", root / "a.slice", root]
    assert [*control_group.folders("cpu", root, tmp_path)] == [*around, root / "cpu"]
    memory = root / "memory"
    assert [*control_group.folders("memory", root, tmp_path)] == [*around, memory / "job" / "a", memory / "job", memory]
    assert [*control_group.folders("memory", root, tmp_path / "absent")] == [root, memory]


@pytest.mark.parametrize(("share", "cores"), [(0.5, 1), (1.5, 2), (float("inf"), 8), (16.0, 8)])
def test_a_share_of_time_bounds_the_cores(monkeypatch: pytest.MonkeyPatch, share: float, cores: int) -> None:
    monkeypatch.setattr("ingot.runtime.devices.os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(devices, "quota", lambda: share)
    assert devices.cpu_count() == cores
