"""The models of a server by TorchServe's rule: without a version, the default one answers."""

from __future__ import annotations

from datetime import UTC, datetime

from ingot.errors import InvalidArgument, ModelNotFound, Unavailable, VersionNotFound
from ingot.runtime import Model
from ingot.runtime.engines.python.torchserve.rows import REQUEST
from ingot.serving import Repository
from ingot.serving.deployment import Deployment
from ingot.serving.pipelines.pipeline import Pipeline
from ingot.tensors import DType

_ROW = [(REQUEST, DType.BYTES)]


class Versions:
    """The default versions; they last as long as the server.

    Args:
        repository: the models.

    Attributes:
        started: the names and versions that the server was started with.
        began: when.
    """

    def __init__(self, repository: Repository):
        self._repository = repository
        self._chosen: dict[str, str] = {}
        self.started = frozenset(repository.deployments)
        self.began = datetime.now(UTC)

    def all(self, name: str) -> list[Deployment]:
        """Return the versions of a model, also those without workers.

        Raises:
            ModelNotFound: there is none.
        """
        found = [each for each in self._repository.deployments.values() if each.name == name]
        if not found:
            raise ModelNotFound(f"Model not found: {name}")
        return found

    def find(self, name: str, version: str = "") -> Deployment:
        """Return a version of a model; without one the default: the chosen one, or else the first that was registered.

        Raises:
            NotFound: there is no such model or version.
        """
        versions = self.all(name)
        wanted = version or self._chosen.get(name, "")
        found = next((each for each in versions if wanted == each.tag), None)
        if found is None and version:
            raise VersionNotFound(f"Model version: {version} does not exist for model: {name}")
        return found or versions[0]

    def model(self, name: str, version: str = "") -> Model:
        """Return the model that answers.

        Raises:
            NotFound: there is no such model or version.
            Unavailable: it has no workers.
        """
        deployment = self.find(name, version)
        if deployment.current is None:
            raise Unavailable(
                f'Model "{name}" has no worker to serve inference request. Please use scale workers API to add '
                f"workers: PUT /models/{name}?min_worker=1"
            )
        return deployment.current

    def workflow(self, name: str) -> Pipeline:
        """Return the pipeline that a workflow has become: one whose only input is that of handlers.

        Raises:
            ModelNotFound: there is none.
            InvalidArgument: it has other inputs.
        """
        for model in self._repository:
            if isinstance(model, Pipeline) and model.name == name:
                if [(spec.name, spec.dtype) for spec in model.signature.inputs] == _ROW:
                    return model
                raise InvalidArgument(
                    f"'{name}' is a pipeline of other inputs than a workflow's: POST /v2/models/{name}/infer"
                )
        raise ModelNotFound(f"Workflow not found: {name}")

    def defaults(self) -> list[Deployment]:
        """Return the default version of each model, by name."""
        return [self.find(name) for name in sorted({each.name for each in self._repository.deployments.values()})]

    def choose(self, name: str, version: str) -> None:
        """Make a version the default.

        Raises:
            NotFound: there is no such model or version.
        """
        self._chosen[name] = self.find(name, version).tag

    def only(self) -> str:
        """Return the name of the only model; empty if there are several or none."""
        names = {each.name for each in self._repository.deployments.values()}
        return names.pop() if len(names) == 1 else ""
