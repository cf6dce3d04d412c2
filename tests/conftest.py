from __future__ import annotations

import asyncio
import gc
import inspect
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.made import MadeOnce, make_once
from tests.model_store.registry.servers import HTPASSWD, PASSWORD, USER, docker_registry
from tests.reaper import pytest_configure as pytest_configure
from tests.reaper import pytest_unconfigure as pytest_unconfigure
from tests.support import IN_PROCESS, ROOT, RequireTool, RunIngot, run_in_process

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from ingot.demo import Data, Digits

# PyTorch's threads wait by spinning: on a busy machine of two cores, training the digits takes 45 s with two threads
# and 2.5 s with one. Subprocesses inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell without job control starts background processes, and thus their children, with this signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Under nohup the tests ignore SIGHUP, and so would the servers that they start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The duration of one example means nothing on a busy machine.
settings.register_profile("ingot", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ingot")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m gpu``, import no other tests: a machine with a GPU may lack their packages."""
    if config.option.markexpr != "gpu":
        return None
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    return None if any(b"pytest.mark.gpu" in file.read_bytes() for file in files) else True


@pytest.hookimpl(tryfirst=True)  # before pytest reorders by fixtures, and before it deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave all but the first case of a test that is marked ``one_case`` to `make test-matrix`."""
    seen = set()
    for item in items:
        if item.get_closest_marker("one_case"):
            test = item.nodeid.partition("[")[0]
            if test in seen:
                item.add_marker(pytest.mark.matrix)
            seen.add(test)


@pytest.hookimpl(tryfirst=True)  # pytest itself refuses such tests
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in a new event loop, for 30 seconds at most."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def bounded() -> None:  # one task, as some tests compare those that are left
        async with asyncio.timeout(30):
            await pyfuncitem.obj(**arguments)

    asyncio.run(bounded())
    return True


def pytest_collection_finish() -> None:
    """Keep the collector from walking modules and collected tests, which stay until the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def digits(made_once: MadeOnce) -> tuple[Digits, Data, Data]:
    """The digits classifier after a few epochs (some 98 % right), the training and the held-out images."""
    import torch

    from ingot.demo import Digits, load, train

    training, held_out = load()
    model = Digits()
    weights = made_once("digits.pt", lambda path: torch.save(train(training, epochs=4).state_dict(), path))
    model.load_state_dict(torch.load(weights, weights_only=True))
    return model.eval(), training, held_out


@pytest.fixture(scope="session")
def digits_fp32(request: pytest.FixtureRequest, made_once: MadeOnce) -> Path:
    """An archive file of the digits classifier, as exported."""

    def make(path: Path) -> None:
        from ingot.demo import INPUT
        from ingot.export import export_model

        model = request.getfixturevalue("digits")[0]
        export_model(model, inputs=[INPUT], output_names=["logits"], name="digits").save(path)

    return made_once("digits.ingot", make)


@pytest.fixture(scope="session")
def digits_archive(request: pytest.FixtureRequest, digits_fp32: Path, made_once: MadeOnce) -> Path:
    """An archive file of the digits classifier with the variants int8 and fp32."""

    def make(path: Path) -> None:
        from ingot.model_store import Archive, BlobFolder
        from ingot.quant import QuantConfig, StaticInt8, quantize

        # On a busy machine such a small model may not be faster: the variant is kept anyway, and comes first.
        config = QuantConfig(recipe=StaticInt8(), force=True)
        blobs = BlobFolder.scratch()
        images = request.getfixturevalue("digits")[1].images
        found = quantize(digits_fp32, {"image": images}, config=config).copy_to(blobs)
        Archive.create(blobs, [found.variant(name).descriptor for name in ("int8", "fp32")]).save(path)

    return made_once("digits-int8.ingot", make)


@pytest.fixture(scope="session")
def made_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """Make a file once for all workers and runs, until a source of it changes; return this session's copy."""
    folder, kept = tmp_path_factory.mktemp("made"), request.config.cache.mkdir("made")
    return lambda name, make: make_once(kept, folder, name, make)


@pytest.fixture
def run_ingot(tmp_path: Path) -> RunIngot:
    home = tmp_path / "home"

    def run(*args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        if args and str(args[0]) in IN_PROCESS and "--load-timeout" not in args:  # its end is that of the process
            return run_in_process([*map(str, args)], cwd or tmp_path, home)
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "INGOT_HOME": str(home), "PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.run(
            [sys.executable, "-m", "ingot", *map(str, args)],
            cwd=cwd or tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.fixture(scope="session")
def require_tool() -> RequireTool:
    def find(name: str) -> str:
        path = shutil.which(name)
        if path is None and os.environ.get("INGOT_REQUIRE_TOOLS") == "1":
            pytest.fail(f"the tool '{name}' is not installed")
        return path or pytest.skip(f"the tool '{name}' is not installed")

    return find


@pytest.fixture(scope="module")  # its event loop must not run during the tests of other modules
def browser(require_tool: RequireTool) -> Iterator[Browser]:
    """A real browser without windows."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=30_000)  # milliseconds: a page changes some seconds after a busy server did
    path = require_tool("chromium")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def registry(require_tool: RequireTool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real registry that anyone may write to."""
    with docker_registry(require_tool("docker-registry"), tmp_path_factory.mktemp("registry")) as port:
        yield f"oci://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def registry_with_password(
    require_tool: RequireTool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, str]]:
    """The address, the user and the password of a real registry that rejects all others."""
    folder = tmp_path_factory.mktemp("guarded")
    with docker_registry(require_tool("docker-registry"), folder, htpasswd=HTPASSWD) as port:
        yield f"oci://127.0.0.1:{port}", USER, PASSWORD
