"""A model in parts, each in the engine that can run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from ingot.errors import EngineTimeout, InvalidArchive, InvalidArgument
from ingot.model_store.format import manifest
from ingot.model_store.format.partition import PartitionPlan, Segment
from ingot.runtime.engines.engine import BaseEngine, Engine
from ingot.tensors import Array, Signature


class PartitionedEngine(BaseEngine):
    """Runs the segments of a plan in sequence; their values pass from engine to engine as arrays.

    Args:
        path: the plan; the segments' files, named by their digests, are in the same folder.
        open_segment: opens the engine of a segment, given its file and format.
    """

    platform = "ingot_partitioned"

    def __init__(self, path: Path, open_segment: Callable[[Path, str], Engine]):
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise InvalidArgument(f"the plan {path} cannot be read: {error.strerror}") from error
        self._plan = manifest.decode(PartitionPlan, raw, "the plan")
        self._engines: list[Engine] = []
        self._terminated = False
        with ExitStack() as on_error:
            on_error.callback(self.close)
            for segment in self._plan.segments:
                self._engines.append(open_segment(path.with_name(segment.blob), segment.format))
                _check_values(segment, self._engines[-1].signature)
            on_error.pop_all()

    @property
    def signature(self) -> Signature:
        return self._plan.signature

    @property
    def device(self) -> str:
        return next((engine.device for engine in self._engines if engine.device != "cpu"), "cpu")

    @property
    def settings(self) -> Mapping[str, str]:
        return {
            f"part_{index}.{name}": value
            for index, engine in enumerate(self._engines)
            for name, value in (("engine", engine.platform), *engine.settings.items())
        }

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        values = dict(inputs)
        self._terminated = False
        for segment, engine in zip(self._plan.segments, self._engines, strict=True):
            if self._terminated:
                raise EngineTimeout("the engine call was ended")
            values.update(engine.run({name: values[name] for name in segment.inputs}))
        answer: dict[str, Array] = {}
        given = set(inputs)  # arrays that the caller has already; outputs must not share memory with them
        for spec, value in zip(self._plan.signature.outputs, self._plan.outputs, strict=True):
            answer[spec.name] = values[value].copy() if value in given else values[value]
            given.add(value)
        return answer

    def terminate(self) -> None:
        """End the running call within a segment if its engine can, otherwise before the next segment."""
        self._terminated = True
        for engine in self._engines:
            engine.terminate()

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
        self._engines = []


def _check_values(segment: Segment, signature: Signature) -> None:
    takes, gives = ({spec.name for spec in specs} for specs in (signature.inputs, signature.outputs))
    if takes != set(segment.inputs) or gives != set(segment.outputs):
        raise InvalidArchive(f"the inputs or outputs of part {segment.blob[:12]} differ from those in the plan")
