"""Packages that a model in Python requires: wheels in its archive, hashes, and servers that install at once."""

from __future__ import annotations

import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.errors import InvalidArgument, NotFound, Unsupported
from ingot.export.python_model import export_class
from ingot.model_store import Archive
from ingot.runtime.engines.python import requirements
from tests.server.test_python_models import serving, source_of, wheel, write
from tests.support import RunIngot, succeeded

CODE = "import side_car\nclass M:\n    def predict_one(self, x: str) -> str: return side_car.VERSION\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a wheel of a package that this environment has until it is removed from the path; no index."""
    wheel(tmp_path / "wheels", "side_car", "1.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (scratch := tmp_path / "scratch").mkdir()
    wheels = {each.name: each for each in (tmp_path / "wheels").iterdir()}
    monkeypatch.syspath_prepend(requirements._install(["side-car==1.0"], wheels, scratch))
    return tmp_path / "wheels"


def exported(folder: Path, line: str, wheels: Path | None) -> Archive:
    pins = write(folder, "requirements.txt", line)
    made = export_class(source_of(folder, CODE, "M"), name="m", requirements=pins, wheels=wheels)
    sys.path.remove(str(folder / "scratch" / "packages"))
    return made


def answer(source: str | Archive) -> list[bytes]:
    with (
        serving(source, allow_code=True, install_requirements=True) as server,
        ingot.Client(server.http_url) as client,
    ):
        found: list[bytes] = client.infer("m", {"x": np.array([b""], object)})["output"].tolist()
        return found


@pytest.mark.matrix
def test_wheels_in_the_archive_are_installed_without_an_index(
    tmp_path: Path, installed: Path, run_ingot: RunIngot, caplog: pytest.LogCaptureFixture
) -> None:
    made = exported(tmp_path, "side-car==1.0\n", installed)
    made.save(out := tmp_path / "m.ingot")
    assert "needs  side-car==1.0 (one of 1 wheel in the archive)" in succeeded(run_ingot("inspect", out))
    for each in installed.iterdir():
        each.unlink()
    with pytest.raises(Unsupported, match="--install-requirements"), serving(made, allow_code=True):
        pass
    with ThreadPoolExecutor(2) as pool:  # two servers at once
        assert [*pool.map(answer, [made, made])] == [[b"1.0"]] * 2
    assert caplog.text.count("installing side-car==1.0") == 1
    # An archive with another wheel of the same version does not get this one.
    sys.path.insert(0, str(tmp_path / "scratch" / "packages"))
    wheel(tmp_path / "others", "side_car", "1.0", shown="9.9")
    assert answer(exported(tmp_path, "side-car==1.0\n", tmp_path / "others")) == [b"9.9"]


@pytest.mark.matrix
def test_hashes_are_kept_and_checked(tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [path] = installed.iterdir()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    made = exported(tmp_path, f"side-car==1.0 \\\n    --hash=sha256:{digest}\n", None)
    monkeypatch.setenv("PIP_FIND_LINKS", str(installed))
    assert answer(made) == [b"1.0"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    wheel(installed, "side_car", "1.0", shown="9.9")
    with pytest.raises(Unsupported, match=r"pip cannot install side-car==1\.0: .*HASHES"):
        answer(made)
    assert not [each for each in (tmp_path / "other" / "ingot" / "packages").iterdir() if each.is_dir()]


def test_missing_wheels_and_hashes_are_named(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "side_car", "1.0")
    assert [each.name for each in requirements.wheels_of(["Side.Car==1.0"], tmp_path / "wheels")]
    with pytest.raises(NotFound, match=r"has no wheel of side-car==2\.0: pip download --no-deps .* side-car==2\.0"):
        requirements.wheels_of(["side-car==1.0", "side-car==2.0"], tmp_path / "wheels")
    good = "--hash=sha256:" + "0" * 64
    assert requirements.hashes_of("a==1\nb==2\n", "r") == {}
    assert requirements.hashes_of(f"a==1 \\\n {good}\n", "r") == {"a==1": (good.removeprefix("--hash="),)}
    for bad in (f"a==1 {good}\nb==2\n", "a==1 --hash=md5:0\n"):
        with pytest.raises(InvalidArgument, match="needs a hash"):
            requirements.hashes_of(bad, "r")
