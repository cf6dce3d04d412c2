"""The image for CPUs is built by Dockerfile and run as Kubernetes runs it, on a base made by debootstrap.

buildah builds without a daemon. A chroot in a mount namespace takes the place of a container's runtime: a read-only
root, a user without a name, an empty /tmp and the image's own variables, but the machine's network and processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.serving.processes import free_ports
from scripts import audit
from tests.support import ROOT, RequireTool

BASE, IMAGE = "localhost/ingot-test-base", "localhost/ingot-test"
USER = "123456:0"  # as OpenShift chooses it: no name, and the group 0
MOST_MIB = 350
# Where the machine keeps how packages are reached; an image takes nothing from it.
MACHINE = ("/etc/pip.conf", "/etc/ssl/certs")


def output(*command: str | Path) -> str:
    run = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.strip()


@pytest.fixture(scope="module")
def image(require_tool: RequireTool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The root of the built image, and its configuration."""
    for tool in ("buildah", "unshare", "chroot"):
        require_tool(tool)
    if os.geteuid() != 0:
        pytest.skip("chroot and mounts need root")
    base = tmp_path_factory.mktemp("base")
    debootstrap, packages = require_tool("debootstrap"), "python3,python3-venv,ca-certificates"
    made = subprocess.run(
        [debootstrap, "--variant=minbase", f"--include={packages}", "bookworm", base], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("debootstrap reaches no mirror")
    containers = [output("buildah", "from", "scratch")]
    try:
        output("buildah", "add", "--quiet", containers[0], base, "/")
        output("buildah", "commit", "--quiet", containers[0], BASE)
        volumes = [text for path in MACHINE if Path(path).exists() for text in ("--volume", f"{path}:{path}:ro")]
        arguments = ["--isolation", "chroot", "--format", "docker", "--build-arg", f"PYTHON={BASE}", *volumes]
        output("buildah", "bud", *arguments, "--target", "cpu", "--tag", IMAGE, ROOT)
        containers.append(output("buildah", "from", "--pull-never", IMAGE))
        about = json.loads(output("buildah", "inspect", "--type", "image", IMAGE))["Docker"]["config"]
        yield Path(output("buildah", "mount", containers[-1])), about
    finally:
        output("buildah", "rm", *containers)
        subprocess.run(["buildah", "rmi", IMAGE, BASE], capture_output=True, check=False)


@pytest.mark.long
def test_the_image_is_small_and_says_what_it_holds(image: tuple[Path, dict[str, Any]]) -> None:
    root, about = image
    packages = root / "opt" / "ingot"
    size = int(output("du", "--summarize", "--block-size=1M", packages).split()[0])
    print(f"{size} MiB of packages")
    assert size <= MOST_MIB
    held = {each["name"].lower(): each for each in json.loads((packages / "sbom.cdx.json").read_text())["components"]}
    pinned = audit.pins(ROOT / "requirements" / "cpu.txt")
    assert {name.replace("_", "-") for name in held} - {"ingot-serve"} <= set(pinned)
    assert {"onnxruntime", "numpy", "fastapi"} <= set(held)
    assert {"pip", "torch"} & {path.name for path in packages.glob("lib/python3*/site-packages/*")} == set()
    assert about["User"] == "10001"
    assert about["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert about["Healthcheck"]["Test"][0] == "CMD"


@pytest.mark.long
def test_it_serves_with_a_read_only_root_and_any_user(
    image: tuple[Path, dict[str, Any]], digits_archive: Path, tmp_path: Path
) -> None:
    root, about = image
    ports = free_ports(2)
    shared = tmp_path / "archive"
    shared.mkdir()
    (shared / "digits.ingot").write_bytes(digits_archive.read_bytes())
    shared.chmod(0o755)
    given = {"INGOT_HOST": "127.0.0.1", "INGOT_HTTP_PORT": str(ports[0]), "INGOT_GRPC_PORT": str(ports[1])}
    variables = [*about["Env"], *(f"{name}={value}" for name, value in given.items())]
    enter = f"""set -e
        mount --rbind {root} {root} && mount -o remount,bind,ro {root}
        mount -t tmpfs -o mode=1777 tmpfs {root}/tmp
        mount --rbind /proc {root}/proc
        mount -t tmpfs -o mode=1777 tmpfs {root}/dev && : > {root}/dev/null
        mount --bind {shared} {root}/models && mount -o remount,bind,ro {root}/models
        exec chroot --userspec={USER} {root} /usr/bin/env -i "$@" """
    command = ["unshare", "--mount", "sh", "-c", enter, "sh", *variables]
    wrote = subprocess.run([*command, "touch", "/opt/x", "/models/x"], capture_output=True, text=True, check=False)
    assert wrote.stderr.count("Read-only file system") == 2
    url = f"http://127.0.0.1:{ports[0]}"
    with subprocess.Popen([*command, *about["Entrypoint"], "serve", "/models/digits.ingot"], cwd="/") as process:
        try:
            assert waited(lambda: httpx.get(f"{url}/v2/health/ready", trust_env=False).status_code == 200)
            health = subprocess.run([*command, *about["Healthcheck"]["Test"][1:]], check=False)
            assert health.returncode == 0
            body = {"inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.0] * 64}]}
            answer = httpx.post(f"{url}/v2/models/digits/infer", json=body, trust_env=False)
            assert answer.status_code == 200
            assert answer.json()["outputs"][0]["shape"] == [1, 10]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert subprocess.run([*command, *about["Healthcheck"]["Test"][1:]], capture_output=True).returncode == 1


def waited(holds: Callable[[], bool]) -> bool:
    for _ in range(600):
        try:
            if holds():
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    return False
