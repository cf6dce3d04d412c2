from __future__ import annotations

from pathlib import Path

import pytest

from ingot.runtime.machine import cgroup, devices


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
    assert [*cgroup.folders("cpu", root, tmp_path)] == [*around, root / "cpu"]
    memory = root / "memory"
    assert [*cgroup.folders("memory", root, tmp_path)] == [*around, memory / "job" / "a", memory / "job", memory]
    assert [*cgroup.folders("memory", root, tmp_path / "absent")] == [root, memory]


@pytest.mark.parametrize(("share", "cores"), [(0.5, 1), (1.5, 2), (float("inf"), 8), (16.0, 8)])
def test_a_share_of_time_bounds_the_cores(monkeypatch: pytest.MonkeyPatch, share: float, cores: int) -> None:
    monkeypatch.setattr("ingot.runtime.machine.devices.os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(devices, "quota", lambda: share)
    assert devices.cpu_count() == cores


@pytest.mark.parametrize(
    ("flags", "allowed", "expected"),
    [
        ("avx2 amx_int8 amx_bf16", True, ["amx_bf16", "amx_int8", "avx2"]),
        ("avx2 amx_int8 amx_bf16", False, ["avx2"]),
        ("avx2 fma", False, ["avx2", "fma"]),
    ],
)
def test_matrix_units_that_a_container_forbids_do_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, allowed: bool, expected: list[str]
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"model name\t: Intel(R) Xeon(R) Processor\nflags\t\t: {flags}\n")
    monkeypatch.setattr(devices, "Path", lambda _: info)
    monkeypatch.setattr(devices, "_may_use_amx", lambda: allowed)
    assert devices.cpu_features.__wrapped__().split()[1:] == expected


def test_virtual_machines_of_one_model_differ_in_their_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    here = devices.describe()
    monkeypatch.setattr(devices, "cpu_features", lambda: "x86_64 amx_int8")
    there = devices.describe()
    assert here != there
    assert here.partition(", instructions ")[0] == there.partition(", instructions ")[0]
