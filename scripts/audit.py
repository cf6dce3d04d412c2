"""Check the packages of the images for known vulnerabilities: ``make audit``.

pip-audit asks the package index's vulnerability service about each release of requirements/*.txt. It also succeeds when
the service knows nothing of a release, so its report is read. Exit status 0: each release was checked, and none is
known to be vulnerable; 1: vulnerabilities, or files that are incomplete; 2: some or all releases could not be checked,
and the output lists them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FILES = tuple(ROOT / "requirements" / name for name in ("build.txt", "sbom.txt", "cpu.txt", "gpu.txt"))
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)((?:.*\\\n)*.*)", re.MULTILINE)


def pins(path: Path) -> dict[str, tuple[str, int]]:
    """Return the version and the number of hashes of each package in a file, by normalized name."""
    found = _PINNED.findall(path.read_text())
    return {_normal(name): (version, rest.count("--hash=sha256:")) for name, version, rest in found}


def faults(path: Path, constraints: Path) -> list[str]:
    """Return the faults that show without a network: a release without hashes, or other than the tested one."""
    tested = pins(constraints)
    found = []
    for name, (version, hashes) in pins(path).items():
        if not hashes:
            found.append(f"{path.name}: {name} has no hashes")
        if name in tested and tested[name][0] != version:
            found.append(f"{path.name}: {name}=={version}, but {constraints.name} has {tested[name][0]}")
    return found


def audited(path: Path) -> tuple[list[str], list[str]]:
    """Return the vulnerabilities of the releases in a file, and the releases that could not be checked."""
    command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes", "--progress-spinner", "off"]
    run = subprocess.run([*command, "-f", "json", "-r", str(path)], capture_output=True, text=True, check=False)
    try:
        report: dict[str, Any] = json.loads(run.stdout)
    except ValueError:
        reason = (run.stderr.strip().splitlines() or ["no output"])[-1]
        return [], [f"{path.name}: {name}: {reason}" for name in pins(path)]
    vulnerable, unchecked = [], []
    seen = set()
    for item in report["dependencies"]:
        name = _normal(item["name"])
        if "skip_reason" in item:
            unchecked.append(f"{path.name}: {name}: {item['skip_reason']}")
        seen.add(name)
        for known in item.get("vulns", ()):
            fixed = ", ".join(known["fix_versions"]) or "no release"
            vulnerable.append(f"{path.name}: {name}=={item['version']}: {known['id']}, fixed in {fixed}")
    unchecked += [f"{path.name}: {name}: not in the report" for name in pins(path) if name not in seen]
    return vulnerable, unchecked


def main() -> int:
    """Print what was found; return the exit status."""
    broken = [fault for path in FILES for fault in faults(path, ROOT / "constraints.txt")]
    reports = [audited(path) for path in FILES]
    vulnerable = [line for found, _ in reports for line in found]
    unchecked = [line for _, left in reports for line in left]
    total = sum(len(pins(path)) for path in FILES)
    for line in [*broken, *vulnerable]:
        print(line)
    for line in unchecked:
        print(f"not checked: {line}")
    print(f"{total - len(unchecked)} of {total} releases checked, {len(vulnerable)} known vulnerabilities")
    if broken or vulnerable:
        return 1
    if unchecked:
        print("This is not a pass: run it again where the vulnerability service can be reached.")
        return 2
    return 0


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
