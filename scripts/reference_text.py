"""Parts of the reference that are written from the code, as Markdown, when the site is built.

A page has them between ``<!-- generate: NAME -->`` and ``<!-- end -->``, where it otherwise says how to read them
without the site. ``python scripts/reference_text.py`` writes the short ones, of metrics and errors, into the pages, so
that they can be read in the repository too; a test checks that they are current.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import typer
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from prometheus_client import CollectorRegistry

from ingot import errors
from ingot.cli.main import app
from ingot.config import ServerConfig
from ingot.protocol import json_codec, proto_codec
from ingot.protocol import open_inference_pb2 as pb
from ingot.runtime import Metrics
from ingot.server.access.gate import MANAGE
from ingot.server.http import schema
from ingot.server.plane.operations import MANAGED, METHODS, OPERATIONS, Operation

_SETTINGS = "Every [setting](settings.md) of the server is an option too: `max_batch` is `--max-batch`."
_SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]

PAGES = [Path(__file__).parent.parent / "docs" / "reference" / name for name in ("errors.md", "metrics.md")]
_PART = re.compile(r"^<!-- generate: (\w+) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)

# The pages that explain metrics, by metric, each with the words of its help that lead there.
_EXPLAINED = {
    "ingot_requests_total": ("code of errors", "errors.md#codes"),
    "ingot_batches_total": ("`max_call_mb`", "../guides/serve/memory.md"),
    "ingot_access_log_lines_total": ("access log", "../guides/operate/observability.md#access-log"),
    "ingot_log_records_lost_total": ("Log records", "../guides/operate/observability.md#access-log"),
    "ingot_padding_elements_total": ("padded", "../concepts/batching.md#padding"),
    "ingot_batch_checks_total": ("ran again alone", "../concepts/batching.md#guard"),
    "ingot_grpc_connections": ("fast gRPC server", "../guides/serve/protocols.md#grpc"),
    "ingot_traces_total": ("spans", "../guides/operate/observability.md#traces"),
    "ingot_shared_memory_regions": ("shared memory", "../guides/serve/protocols.md#shared-memory"),
    "ingot_engine_calls_ended_total": (
        "Engine calls that were ended",
        "../concepts/isolation.md#engine-calls-that-do-not-end",
    ),
    "ingot_resident_memory_bytes": ("engine processes", "../concepts/isolation.md"),
    "ingot_gpu_memory_bytes": ("with a model on a GPU", "../guides/serve/gpu.md#metrics"),
    "ingot_model_device_memory_bytes": ("on a GPU", "../guides/serve/gpu.md#memory"),
    "ingot_batches_out_of_memory_total": ("too little memory", "../guides/serve/gpu.md#memory"),
    "ingot_lost_devices": ("device that failed", "../guides/serve/gpu.md#devices-that-fail"),
    "ingot_model_cpu_fallback": ("runs on the CPU", "../guides/serve/gpu.md#devices"),
    "ingot_memory_returned_bytes_total": ("given back", "../guides/serve/memory.md"),
    "ingot_limited_total": ("limit on clients", "../guides/operate/limits-on-clients.md"),
    "ingot_auth_refused_total": ("refused", "../guides/operate/access.md#api-keys"),
    "ingot_rollouts_total": ("Changes of the archive that answers", "../concepts/versions.md"),
    "ingot_server_info": ("name among replicas", "../guides/operate/observability.md#replicas"),
    "ingot_memory_budget_bytes": ("memory budget", "../guides/serve/memory.md#memory-budget"),
    "ingot_canary_requests_total": ("canary or shadow", "../concepts/versions.md#canary-and-shadow"),
    "ingot_reloads_total": ("Files loaded again", "../guides/operate/access.md#changed-files"),
    "ingot_audit_suppressed_total": ("audit log", "../guides/operate/access.md#audit-log"),
    "ingot_model_variant_info": ("variant", "../guides/serve/serving.md#variants"),
    "ingot_derived_cache_total": ("large models", "../guides/serve/serving.md#large-models"),
    "ingot_signature_checks_total": ("trust policy", "../guides/serve/serving.md#trust"),
    "ingot_engine_restarts_total": ("Engine processes", "../concepts/isolation.md"),
    "ingot_management_total": ("management", "../guides/operate/management.md"),
    "ingot_sequences": ("sequences", "../guides/serve/sequences.md#sequences"),
    "ingot_cache_hits_total": ("response cache", "../guides/serve/response-cache.md"),
    "ingot_recorded_requests_total": ("recorded", "../guides/operate/management.md#recording-requests"),
}


def built(page: str) -> str:
    """Return a page of the site: its generated parts in place of their markers."""
    return _PART.sub(lambda part: globals()[part[1]](), page)


def updated(page: str) -> str:
    """Return a page of the repository with its generated parts as they are now, between their markers."""
    return _PART.sub(lambda part: f"<!-- generate: {part[1]} -->\n\n{globals()[part[1]]()}\n\n<!-- end -->", page)


def commands() -> str:
    """Return each command with its usage, help, arguments and options; those of settings are on their own page."""
    root = typer.main.get_command(app)
    return "\n\n".join(_command(command, name) for name, command in all_commands(root, "ingot"))


def all_commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each command that a command or group ends in, with its full name."""
    members = getattr(command, "commands", None)
    if members is None:
        yield name, command
        return
    for part, member in members.items():
        yield from all_commands(member, f"{name} {part}")


def _command(command: Any, name: str) -> str:
    """Return the section of a command: typer has click's classes, but not always from click."""
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    given = [item for item in command.params if item.name not in ServerConfig.settings()]
    help_text = (command.help or "").replace("\\[", "[")  # escaped, as the terminal's markup has brackets
    table = _table(("argument, option", "default", "variable", ""), [_parameter(item) for item in given])
    settings = "" if len(given) == len(command.params) else f"\n\n{_SETTINGS}"
    return f"## `{name}`\n\n```text\n{name} {usage}\n```\n\n{help_text}\n\n{table}{settings}"


def _parameter(option: Any) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if option.param_type_name == "argument":
        names = f"`{option.name.upper()}`"
    about, _, default = (option.help or "").replace("\\[", "[").partition(" [default: ")
    shown = option.show_default if isinstance(option.show_default, str) else default.removesuffix("]")
    if not shown and option.default not in (None, False, (), []) and not callable(option.default):
        shown = str(option.default)
    variables = [option.envvar] if isinstance(option.envvar, str) else option.envvar or ()
    if option.required:
        shown = "required"
    return names, shown, ", ".join(f"`{name}`" for name in variables), about


def http() -> str:
    """Return the operations over HTTP, and the documents that they read and return."""
    rows = [
        (
            "<br>".join(f"`{route}`" for route in operation.http),
            f"[`{operation.grpc}`](grpc-api.md)" if operation.grpc else "",
            _scope(operation),
            _schema_link(operation.request or ""),
            _schema_link(operation.response),
            operation.needs.text if operation.needs else "",
        )
        for operation in OPERATIONS
        if operation.http
    ]
    head = ("request", "over gRPC", "scope of a key", "body", "answer", "works with")
    parts = ["## Operations\n", _table(head, rows)]
    for name, kind in _documents().items():
        parts.append(f"\n## `{name}`\n")
        if "description" in kind:
            parts.append(f"{kind['description']}\n")
        if "properties" not in kind:
            parts.append(f"It is a {_kind(kind)}.\n")
            continue
        required = kind.get("required", ())
        fields = [
            (f"`{field}`", _kind(about), "yes" if field in required else "no")
            for field, about in kind.get("properties", {}).items()
        ]
        parts.append(_table(("field", "type", "required"), fields))
    return "\n".join(parts)


def _scope(operation: Operation) -> str:
    """Return the right that an operation needs, in words: on the management listener it is always the same."""
    scope = MANAGE if operation.needs is MANAGED else operation.scope
    return f"`{scope}`" if scope else "none"


def _documents() -> dict[str, Any]:
    """Return the schemas of bodies, with those that they consist of, by name."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for item in OPERATIONS for name in (item.request, item.response) if name):
        if (model := schema.MODELS.get(_inner(name))) is not None:
            document = model.model_json_schema()
            found |= {**document.pop("$defs", {}), model.__name__: document}
    return found | {"Refusal": schema.MODELS["Refusal"].model_json_schema()}


def _inner(name: str) -> str:
    return name.removeprefix("list[").removesuffix("]")


def _schema_link(name: str) -> str:
    many = "list of " if name.startswith("list[") else ""
    inner = _inner(name)
    return f"{many}[`{inner}`](#{inner.lower()})" if inner in _documents() else schema.IN_WORDS.get(name, "")


def _kind(schema: dict[str, Any]) -> str:
    """Return a schema in words, with links to the named ones."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[`{name}`](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    values = schema.get("additionalProperties")
    if schema.get("type") == "object" and isinstance(values, dict):
        return f"object of {_kind(values)}"
    return str(schema.get("type", "any"))


def grpc_methods() -> str:
    """Return the methods and messages of the gRPC service."""
    rows = [
        (
            f"`{method.name}`",
            *map(_message, _ends(method)),
            _scope(operation),
            operation.needs.text if operation.needs else "",
        )
        for method in _SERVICE.methods
        for operation in (METHODS[method.name],)
    ]
    head = ("method", "request", "response", "scope of a key", "works with")
    parts = ["## Methods\n", _table(head, rows)]
    for name, message in pb.DESCRIPTOR.message_types_by_name.items():
        parts.append(f"\n## {name}\n")
        fields = [(f"`{field.name}`", str(field.number), _field_type(field)) for field in message.fields]
        parts.append(_table(("field", "number", "type"), fields) if fields else "No fields.")
    return "\n".join(parts)


def _ends(method: MethodDescriptor) -> tuple[tuple[str, bool], tuple[str, bool]]:
    return (method.input_type.name, method.client_streaming), (method.output_type.name, method.server_streaming)


def _message(end: tuple[str, bool]) -> str:
    name, stream = end
    return f"{'stream of ' if stream else ''}[`{name}`](#{name.lower()})"


def _field_type(field: FieldDescriptor) -> str:
    kinds = {number: name[5:].lower() for name, number in vars(FieldDescriptor).items() if name.startswith("TYPE_")}
    many = "list of " if field.is_repeated else ""
    if field.message_type is None:
        return f"{many}{kinds[field.type]}"
    nested = field.message_type
    if nested.GetOptions().map_entry:
        key, value = nested.fields
        return f"map from {kinds[key.type]} to {_field_type(value)}"
    if nested.containing_type is None:
        return f"{many}[`{nested.name}`](#{nested.name.lower()})"
    inside = ", ".join(f"`{item.name}` {_field_type(item)}" for item in nested.fields)
    return f"{many}`{nested.name}` ({inside})"


def error_codes() -> str:
    """Return the table of the codes of errors, with the class and the status of each protocol."""
    names = {code.value[0]: code.name for code in grpc.StatusCode}
    rows = [
        (f"`{code.value}`", f"`{kind.__name__}`", str(json_codec.STATUS[code]), names[proto_codec.STATUS[code]])
        for code, kind in errors.CLASSES.items()
    ]
    return _table(("code", "class", "HTTP", "gRPC"), rows)


def error_classes() -> str:
    """Return the tree of the error classes, each with the first paragraph of its docstring."""
    return "\n".join(_error_lines(errors.IngotError, 0))


def _error_lines(kind: type[errors.IngotError], depth: int) -> Iterator[str]:
    first = " ".join(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].split())
    yield f"{'    ' * depth}- `{kind.__name__}`: {re.sub(r'``', '`', first)}"
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _error_lines(child, depth + 1)


def metrics() -> str:
    """Return the list of metrics, with their kinds, labels and help."""
    return "\n".join(f"- {text}" for text in sorted(_metrics()))


def _metrics() -> Iterator[str]:
    for collector in vars(Metrics()).values():
        for family in () if isinstance(collector, CollectorRegistry) else collector.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = getattr(collector, "_labelnames", getattr(family, "_labelnames", ()))
            shown = f" ({', '.join(f'`{label}`' for label in labels)})" if labels else ""
            phrase, page = _EXPLAINED.get(name, ("", ""))
            text = family.documentation.replace(phrase, f"[{phrase}]({page})", 1) if phrase else family.documentation
            yield f"`{name}`{shown}, {family.type}: {text}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(map(_cell, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(updated(path.read_text()))
