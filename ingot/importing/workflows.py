"""TorchServe's workflows: the graph of a ``.war`` archive becomes a pipeline, and its functions become models.

Source: frontend/server/src/main/java/org/pytorch/serve/ensemble of https://github.com/pytorch/serve 0.12.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from ingot.errors import InvalidArgument
from ingot.importing import custom_handlers, pipelines
from ingot.importing.mar_manifest import MANIFEST, MarModel, Workflow
from ingot.importing.members import Members
from ingot.importing.record import Candidate, Consent, Imported
from ingot.model_store.references import name_from
from ingot.runtime.engines.python.torchserve.rows import BODY, HEAD, REQUEST

_MAX_SPEC = 1 << 20
# Settings of all models; other keys are models.
_SETTINGS = {"min-workers", "max-workers", "batch-size", "max-batch-delay", "retry-attempts", "timeout-ms"}
_NODE = re.compile(r"[A-Za-z_][\w\-]*")


def candidates(
    members: Members, base: str, workflow: Workflow, scratch: Path, consent: Consent
) -> tuple[Candidate, ...]:
    """Return the functions of a workflow, each of which becomes a model, and the workflow as lines of ``ingot.toml``.

    Args:
        members: the files of the archive.
        base: the prefix of their names.
        workflow: of its manifest.
        scratch: an empty folder for unpacked files.
        consent: the user's consent.

    Raises:
        InvalidArgument: the specification is not valid, or cannot become a pipeline.
    """
    read = _Reader(members, base, workflow, scratch, consent)
    functions = [node for node in read.parents if node not in read.models]
    if functions:
        consent.need_code(f"{members.path} has functions in Python, '{workflow.handler}': {', '.join(functions)}")
    text = read.lines()
    pipeline = Candidate(str(members.path), name_from(workflow.workflow_name), None, read.refuse, lines=text)
    return (
        *(
            Candidate(f"{members.path}:{node}", name_from(read.name(node)), None, partial(read.function, node))
            for node in functions
        ),
        pipeline,
    )


class _Reader:
    """A workflow.

    Attributes:
        models: the references of its models by their nodes.
        parents: the nodes that each node reads.
    """

    def __init__(self, members: Members, base: str, workflow: Workflow, scratch: Path, consent: Consent):
        self._members, self._base, self._workflow = members, base, workflow
        self._scratch, self._consent = scratch, consent
        self._where = f"{workflow.spec_file[:200]} in {members.path}"
        if base + workflow.spec_file not in members.sizes:
            raise InvalidArgument(f"the manifest names {self._where}, which is not in it; create the archive again")
        text = members.read(base + workflow.spec_file, _MAX_SPEC).decode("utf-8", "replace")
        spec = custom_handlers.mapping(text, self._where)
        self.models = self._models(spec.get("models"))
        self.parents = self._parents(spec.get("dag"))

    def _models(self, listed: Any) -> dict[str, str]:
        found = {key: value for key, value in _mapping(listed).items() if key not in _SETTINGS}
        urls = {key: str(_mapping(value).get("url") or "") for key, value in found.items()}
        if missing := sorted(key for key, url in urls.items() if not url):
            raise InvalidArgument(f"{self._where}: the model '{missing[0][:100]}' has no url, such as net.mar")
        return {key: name_from(PurePosixPath(url).stem) for key, url in urls.items()}

    def _parents(self, dag: Any) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for node, children in _mapping(dag).items():
            found.setdefault(node, [])
            for child in children if isinstance(children, list) else [children]:
                if child:
                    found.setdefault(str(child), []).append(node)
        first = [node for node, parents in found.items() if not parents]
        if len(first) != 1:
            raise InvalidArgument(f"{self._where} must have one first node in dag, but has {len(first)}")
        if odd := [node for node in found if not _NODE.fullmatch(node)]:
            raise InvalidArgument(f"{self._where}: '{odd[0][:100]}' is not a node's name: letters, digits, '_' and '-'")
        return found

    def name(self, node: str) -> str:
        """Return the name under which the model of a node is served."""
        return f"{self._workflow.workflow_name}__{node}"

    def function(self, node: str) -> Imported:
        """Unpack the workflow with one of its functions as the handler."""
        handler = f"{self._workflow.handler}:{node}"
        model = MarModel(modelName=self.name(node), handler=handler)
        folder = self._scratch / node
        found = custom_handlers.read(self._members, self._base, model, folder, self._consent)
        (folder / MANIFEST).parent.mkdir(exist_ok=True)
        (folder / MANIFEST).write_text(json.dumps({"model": {"modelName": self.name(node), "handler": handler}}))
        return found

    def refuse(self) -> Imported:
        """Refuse to be read as a model."""
        raise InvalidArgument(f"{self._members.path} is a workflow, which ingot import writes as lines of ingot.toml")

    def lines(self) -> str:
        """Return the workflow as a pipeline of handlers: nodes of several parents read a row with their answers."""
        nodes: dict[str, dict[str, Any]] = {}
        for node, parents in self.parents.items():
            source = f"{parents[0]}.{BODY}" if parents else REQUEST
            if len(parents) > 1:
                nodes[f"{node}-row"] = {"step": "row", "inputs": {each: f"{each}.{BODY}" for each in parents}}
                source = f"{node}-row.row"
            nodes[node] = {"model": self.name(node), "inputs": {REQUEST: source}}
        read = {parent for parents in self.parents.values() for parent in parents}
        last = [node for node in self.parents if node not in read]
        if not last:
            raise InvalidArgument(f"{self._where}: the nodes wait for each other in a cycle")
        outputs = {node: f"{node}.{BODY}" for node in last}
        if len(last) == 1:
            outputs = {part: f"{last[0]}.{part}" for part in (BODY, HEAD)}
        sources = {self.name(node): self.models.get(node) or name_from(self.name(node)) for node in self.parents}
        table = {"inputs": [REQUEST], "outputs": outputs, "nodes": nodes}
        return pipelines.lines(self._where, self._workflow.workflow_name, sources, table)


def _mapping(value: Any) -> Mapping[str, Any]:
    return {str(key): each for key, each in value.items()} if isinstance(value, Mapping) else {}
