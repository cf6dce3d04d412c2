"""Builds wheels: pure ones or, with INGOT_COMPILE=1, ones whose request path mypyc has compiled.

The modules are listed in pyproject.toml, with this hook. A compiled wheel also has their source, which INGOT_PURE=1
runs and tracebacks show. MYPYC_OPT_LEVEL is the compiler's level of optimization, 2 by default.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# mypyc appends "__mypyc" to the name of the library; ingot/_build.py looks for it.
_LIBRARY = "ingot._compiled"
_WANTED = os.environ.get("INGOT_COMPILE", "") not in ("", "0")
# Without the project's own options, whose plugins and stubs a build does not install. Other packages are called as
# Python calls them, whatever their types; mypy would need minutes and gigabytes to read them all. `make lint` reports
# errors of types; here, modules that import packages which a build lacks, such as PyTorch, would have some. mypyc needs
# the types of all expressions in the modules that it compiles, which mypy does not keep where errors are ignored.
_MYPY = """\
[mypy]
ignore_errors = True
ignore_missing_imports = True
follow_imports = skip
[mypy-ingot.*,numpy.*]
follow_imports = normal
[mypy-{compiled}]
ignore_errors = False
"""


class CompileHook(BuildHookInterface):
    """Compiles modules into the wheel if INGOT_COMPILE is set."""

    def dependencies(self) -> list[str]:
        """Return the requirements of the build: the compiler, and what it reads the types of."""
        return list(self.config["requires"]) if _WANTED else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the modules, unless an editable installation is made, which runs the source."""
        if not _WANTED or version == "editable":
            return
        folder = Path(self.root, "build", "compiled")
        built = compile_modules(self.config["modules"], folder)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"].update({str(path): str(path.relative_to(folder / "lib")) for path in built})


def compile_modules(modules: list[str], folder: Path) -> list[Path]:
    """Compile modules, named as paths from the root, the working folder, and return the libraries in ``folder/lib``."""
    import shutil

    from mypyc.build import mypycify
    from setuptools import Distribution

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = folder / "mypy.ini"
    names = (path.removesuffix(".py").replace("/", ".") for path in modules)
    config.write_text(_MYPY.format(compiled=",".join(names)))
    extensions = mypycify(
        [f"--config-file={config}", "--cache-dir", str(folder / "cache"), *modules],
        only_compile_paths=modules,
        opt_level=os.environ.get("MYPYC_OPT_LEVEL", "2"),
        debug_level="0",
        group_name=_LIBRARY,
        target_dir=str(folder / "c"),
    )
    command = Distribution({"name": "ingot", "ext_modules": extensions}).get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "objects")
    command.ensure_finalized()
    command.run()
    return sorted(path for path in (folder / "lib").rglob("*") if path.is_file())
