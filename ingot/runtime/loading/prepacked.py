"""Large ONNX models from a store: ready at once, with packed weights in memory once for all processes.

ONNX Runtime copies each weight into the order in which its kernels read it ("prepacking"), in every process, before the
first answer. That takes most of the load time, and as much memory as the weights for each process. It can save the
copies and map them, but still packs and hashes the weights to match them with their copies. So a model first serves
from its unpacked weights, mapped from the store. Meanwhile the saved form is looked up in the
:mod:`~ingot.model_store.store.derived` cache, or built in another process, and then replaces it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import IngotError, Unavailable
from ingot.model_store import Variant
from ingot.model_store.store.derived import CacheEntry, DerivedCache
from ingot.runtime.engines.engine import Engine
from ingot.runtime.engines.isolation import confinement
from ingot.runtime.engines.isolation.engine import Isolation
from ingot.runtime.engines.loader import engine_of, load_engine
from ingot.runtime.engines.opening import ENGINES
from ingot.runtime.engines.spec import EngineSpec
from ingot.runtime.machine import devices
from ingot.runtime.settings.settings import Settings

log = logging.getLogger(__name__)

MIN_BYTES = 16 << 20
"""Models with fewer weights in separate blobs are loaded without the cache."""
# Incremented with every change to how the files are made.
_FORM = 1

Test = Callable[[Engine], None]


@dataclass(frozen=True, kw_only=True)
class Prepacked:
    """How a variant is opened through the derived cache.

    ``graph`` is the variant's own graph, ``weights`` the size of the blobs that it refers to, in bytes.
    """

    graph: Path
    weights: int
    cache: DerivedCache
    manifest: str
    library: Path | None
    isolation: Isolation | None = None

    @classmethod
    def of_variant(cls, variant: Variant, settings: Settings, isolation: Isolation | None = None) -> Prepacked | None:
        """Return how to open a variant through the cache; None if that is impossible or has no benefit."""
        weights = sum(layer.size for layer in variant.weights)
        if not settings.derived_cache or variant.serving.format != "onnx" or weights < MIN_BYTES:
            return None
        on_cpu = settings.device == "cpu" or (settings.device == "auto" and not devices.has_cuda())
        cache = DerivedCache.for_blobs(variant.blobs)
        if not on_cpu or engine_of(variant, settings.engine) != ENGINES[0] or cache is None:
            return None
        return cls(
            graph=variant.path(),
            weights=weights,
            cache=cache,
            manifest=variant.descriptor.hex,
            library=settings.ort_library,
            isolation=isolation,
        )

    def entry(self) -> CacheEntry:
        """Return the cache entry of the saved form, which is specific to engine build, processor and library."""
        from ingot.runtime.engines.ort import ort_session

        parts = [f"form {_FORM}", ort_session.version(), devices.cpu_features()]
        if self.library is not None:
            parts.append(hashlib.sha256(self.library.read_bytes()).hexdigest())
        key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        return self.cache.entry(self.manifest, f"ort-{key[:16]}")

    def open_early(self, threads: int, test: Test) -> Engine | None:
        """Open the variant with unpacked weights; None if it then fails ``test``."""
        engine: Engine | None = None
        try:
            entry = self.entry()
            saved = entry.find()
            path = entry.path / "model.onnx" if saved else self.graph
            engine = self._open(path, threads, optimized=saved, packed=False)
            test(engine)
        except (IngotError, OSError) as error:
            if engine is not None:
                engine.close()
            log.info("%s needs its weights packed: %s", self.graph.name, error)
            return None
        return engine

    def open_saved(self, entry: CacheEntry, threads: int) -> Engine:
        """Open the saved form.

        Raises:
            InvalidArgument: it is missing or damaged.
        """
        return self._open(entry.path / "model.onnx", threads, optimized=True)

    def open_whole(self, threads: int) -> Engine:
        """Open the variant without the cache."""
        return self._open(self.graph, threads)

    def _open(self, path: Path, threads: int, *, optimized: bool = False, packed: bool = True) -> Engine:
        return load_engine(
            EngineSpec(
                path, device="cpu", threads=threads, ort_library=self.library, optimized=optimized, packed=packed
            ),
            self.isolation,
        )

    def build(self, entry: CacheEntry) -> bool:
        """Make the saved form in this process unless it exists; return whether it was made.

        Raises:
            InvalidArgument: ONNX Runtime cannot save this model.
            OSError: the store cannot be written, or its disk is too full.
        """

        def fill(folder: Path) -> None:
            from ingot.runtime.engines.ort import ort_session

            ort_session.save_prepacked(self.graph, folder, self.library)

        return entry.build(fill, 2 * self.weights)


class Builder:
    """The process that makes a saved form. It can be killed, and returns all its memory when it ends.

    Args:
        prepacked: the variant.
        entry: the destination.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, prepacked: Prepacked, entry: CacheEntry):
        # With this module path, and without the current folder of the server.
        arguments = (prepacked.graph, str(prepacked.weights), entry.path, prepacked.library or "")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import main; main()", *arguments],
            env={**os.environ, "PYTHONPATH": confinement.module_path()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the server, which kills it
        )

    def finish(self) -> None:
        """Wait for its end.

        Raises:
            Unavailable: it failed or was killed.
        """
        _, errors = self._process.communicate()
        if code := self._process.returncode:
            last = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise Unavailable(last or f"the process that packs weights ended with code {code}")

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()


def main() -> None:
    """Make the saved form; command-line arguments are the graph, bytes of its weights, entry, and library or ""."""
    graph, weights, path, library = sys.argv[1:]
    entry = CacheEntry(Path(path))
    how = Prepacked(
        graph=Path(graph),
        weights=int(weights),
        cache=DerivedCache(entry.path.parents[1]),
        manifest=entry.manifest_hex,
        library=Path(library) if library else None,
    )
    os.nice(10)  # serving processes take precedence
    try:
        how.build(entry)
    except (IngotError, OSError) as error:
        raise SystemExit(str(error)) from error
