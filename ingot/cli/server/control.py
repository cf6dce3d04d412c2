"""``ingot server status``, ``reload``, ``load``, ``unload``, ``canary``, ``shadow``: over the management listener."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ingot.cli.completion import served
from ingot.cli.connection import CaOption, Server, only_server
from ingot.cli.options import Json, with_options
from ingot.cli.output import print_json, say
from ingot.client.management import model_path, reading
from ingot.errors import InvalidArgument, NotFound
from ingot.report.units import size


@dataclass(frozen=True, kw_only=True)
class ManagementListener:
    """The management listener of a running server, and the credentials for it."""

    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            envvar="INGOT_MANAGEMENT_URL",
            help="The management listener: a path of a Unix socket, or http(s)://HOST:PORT. By default that of the one "
            "server of this user on this machine.",
        ),
    ] = None
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file",
            help="File of an API key with the right manage, for a port.",
            show_default="the variable INGOT_API_KEY",
        ),
    ] = None
    ca_file: CaOption = None

    def connect(self) -> Server:
        """Return the server; see :class:`Server` for the errors."""
        return Server(self.server or only_server("--server PLACE"), self.key_file, self.ca_file)


@with_options
def status(listener: ManagementListener, as_json: Json = False) -> None:
    """Show the models, their states, and why a change did not take place.

    Examples:

        ingot server status
        ingot server status --server https://host:9000 --key-file manage.key
    """
    place = listener.connect()
    found = place.ask("GET", "/v2/repository/status")
    if as_json:
        print_json(found)
        return
    with reading(place.place):
        for each in found:
            follows = ", followed" if each["follows"] else ""
            held = {device: size(count) for device, count in each["memory"].items() if device != "loaded"}
            memory = "".join(f"  {text} of {device}" for device, text in held.items() if each["memory"]["loaded"])
            shown = f"{each['digest'][:19]}  {each['source']}{follows}{memory}"
            say(f"{each['name']}:{each['version']}  {each['state']}  {shown}")
            if each["candidate"]:
                say(f"  {each['candidate']['digest'][:19]} is {each['candidate']['state']}")
            if each["canary"] and each["canary"]["state"] == "running":
                weight = each["canary"]["weight"]
                say(f"  {each['canary']['digest'][:19]} gets {f'{weight:g} % of the requests' if weight else 'copies'}")
            if reason := each["update_failed"] or each["reason"]:
                say(f"  {reason}")


@with_options
def reload(
    *,
    name: Annotated[
        str, typer.Argument(help="A model, or MODEL:VERSION; without one, all that are loaded.", autocompletion=served)
    ] = "",
    listener: ManagementListener,
    as_json: Json = False,
) -> None:
    """Reload models whose source has changed. Exits 1 if a reload fails; the old version keeps serving.

    Examples:

        ingot server reload
        ingot server reload digits
    """
    place = listener.connect()
    done = place.ask("POST", "/v2/repository/reload", {"name": name})
    with reading(place.place):
        if as_json:
            print_json(done)
        else:
            for line in done["configuration"]:
                say(line)
            for each in done["models"]:
                change = f"{each['from'][:19]} -> {each['to'][:19]}: " if each["result"] != "unchanged" else ""
                say(f"{each['name']}:{each['version']}  {change}{each['result']}{_reason(each)}")
        failed = bool(done["failed"])
    if failed:
        raise typer.Exit(1)


@with_options
def load(
    name: Annotated[
        str, typer.Argument(help="A model of the server, or the name of a new one.", autocompletion=served)
    ],
    *,
    source: Annotated[
        str | None, typer.Argument(help="The source of a new model, or another one for the model, as for ingot serve.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the model: NAME=VALUE, as in ingot.toml.")
    ] = None,
    listener: ManagementListener,
    as_json: Json = False,
) -> None:
    """Load a model, or load it again; a running one answers until the new one is ready.

    Examples:

        ingot server load sums ./sums.onnx --set instances=2
    """
    if source is not None and _is_local_file(source):
        source = str(Path(source).absolute())
    parameters: dict[str, Any] = {} if source is None else {"source": source}
    for setting in settings or ():
        label, found, value = setting.partition("=")
        if not found:
            raise InvalidArgument(f"--set '{setting}' is not NAME=VALUE, such as --set instances=2")
        parameters[label] = value
    path = model_path(name, "load")
    place = listener.connect()
    done = place.ask("POST", path, {"parameters": parameters})
    if as_json:
        print_json(done)
        return
    with reading(place.place):
        say(f"{done['name']}:{done['version']} is {done['state']}")


@with_options
def unload(
    name: Annotated[str, typer.Argument(help="A model, or MODEL:VERSION.", autocompletion=served)],
    listener: ManagementListener,
) -> None:
    """Unload a model once the requests that it has are answered.

    Examples:

        ingot server unload sums
    """
    listener.connect().ask("POST", model_path(name, "unload"), {})
    say(f"{name} is unloaded")


ModelArgument = Annotated[str, typer.Argument(help="A model, or MODEL:VERSION.", autocompletion=served)]
CandidateArgument = Annotated[
    str | None, typer.Argument(help="The source of a candidate, as for ingot serve; without one, that which is tried.")
]
StopOption = Annotated[bool, typer.Option("--stop", help="Let the current model answer all requests.")]


@dataclass(frozen=True, kw_only=True)
class ComparedAnswers:
    """How answers of both models are compared; None for the model's settings."""

    tolerance: Annotated[
        float | None,
        typer.Option(help="Largest error of an answer that does not differ, as a share of the output's largest value."),
    ] = None
    compare: Annotated[float | None, typer.Option(help="Percent of the requests that both models answer.")] = None


@dataclass(frozen=True, kw_only=True)
class CanaryPlan:
    """The steps and limits of a canary; None for the model's settings."""

    weight: Annotated[float | None, typer.Option(help="Percent of the requests; at 100 it takes over.")] = None
    steps: Annotated[str | None, typer.Option(help="Percentages, step by step, before it takes over: 5,25,50.")] = None
    every: Annotated[str | None, typer.Option(help="Least time of a step: 60s.")] = None
    errors: Annotated[float | None, typer.Option(help="Percent of its requests that it may fail.")] = None
    drift: Annotated[float | None, typer.Option(help="Percent of compared answers that may differ.")] = None
    latency: Annotated[float | None, typer.Option(help="Highest ratio of its p99 latency to the model's.")] = None


@with_options
def canary(
    name: ModelArgument,
    *,
    source: CandidateArgument = None,
    plan: CanaryPlan,
    compared: ComparedAnswers,
    sticky: Annotated[
        bool | None, typer.Option("--sticky/--no-sticky", help="Send all requests of a client to the same model.")
    ] = None,
    stop: StopOption = False,
    listener: ManagementListener,
    as_json: Json = False,
) -> None:
    """Give a candidate a share of a model's requests; beyond a limit it is rolled back. Without options, show it.

    Options that are not given have the values of the model's settings canary_... in ingot.toml.

    Examples:

        ingot server canary digits digits:2 --weight 10 --errors 1 --drift 1 --latency 1.5
        ingot server canary digits --weight 100
        ingot server canary digits --stop
    """
    given = {"source": source, **vars(plan), **vars(compared), "sticky": sticky}
    _try(listener.connect(), name, given, stop=stop, as_json=as_json)


@with_options
def shadow(
    name: ModelArgument,
    *,
    source: CandidateArgument = None,
    compared: ComparedAnswers,
    stop: StopOption = False,
    listener: ManagementListener,
    as_json: Json = False,
) -> None:
    """Let a candidate answer copies of a model's requests, and compare the answers. Without options, show it.

    Examples:

        ingot server shadow digits digits:2 --compare 20
        ingot server shadow digits --stop
    """
    given: dict[str, Any] = {"source": source, **vars(compared)}
    if any(value is not None for value in given.values()):
        given["shadow"] = True
    _try(listener.connect(), name, given, stop=stop, as_json=as_json)


def _try(server: Server, name: str, given: Mapping[str, Any], *, stop: bool, as_json: bool) -> None:
    """Begin, change, stop or show the canary of a model."""
    parameters = {label: value for label, value in given.items() if value is not None}
    if (source := parameters.get("source")) is not None and _is_local_file(source):
        parameters["source"] = str(Path(source).absolute())
    path = model_path(name, "canary")
    if stop and parameters:
        raise InvalidArgument(f"use --stop without other options; leave --{next(iter(parameters))} out")
    if stop or parameters:
        found = server.ask("DELETE", path) if stop else server.ask("POST", path, parameters)
    else:
        wanted, _, version = name.partition(":")
        status = server.ask("GET", "/v2/repository/status")
        with reading(server.place):
            served = [each for each in status if each["name"] == wanted and version in ("", each["version"])]
            found = next((each["canary"] for each in served if each["canary"]), None)
        if found is None:
            raise NotFound(f"no candidate is tried for model '{name}'; name its source, such as digits:2")
    if as_json:
        print_json(found)
    else:
        with reading(server.place):
            _say_canary(name, found)


def _say_canary(name: str, canary: Mapping[str, Any]) -> None:
    requests, answers, latency = canary["requests"], canary["answers"], canary["latency"]
    share = f"canary {canary['weight']:g} %" if canary["weight"] else "shadow"
    steps = f", step {canary['step'] + 1} of {len(canary['steps'])}" if canary["steps"] else ""
    state = f"{share}{steps}" if canary["state"] == "running" else canary["state"]
    say(f"{name}  {state}  {canary['digest'][:19]}")
    if canary["reason"]:
        say(f"  {canary['reason']}")
    if canary["state"] == "running" and not canary["source"]:
        say("  a restart of the server serves the candidate at once, as the model's source already has it")
    counts = [f"{side} {each['answered']} ({each['failed']} failed)" for side, each in requests.items()]
    say(f"  requests  {', '.join(counts)}")
    agreement = "" if answers["agreement"] is None else f", {answers['agreement']:.2%} agree"
    worst = answers["worst_error"] if isinstance(answers["worst_error"], str) else f"{answers['worst_error']:.3g}"
    say(f"  answers   {answers['compared']} compared{agreement}, worst error {worst}, {answers['dropped']} dropped")
    ratios = [f"{label[:3]} {'-' if value is None else value}" for label, value in latency.items()]
    say(f"  latency   candidate over current: {', '.join(ratios)}")


def _reason(each: Mapping[str, str]) -> str:
    return f": {each['reason']}" if each["reason"] else ""


def _is_local_file(source: str) -> bool:
    return "://" not in source and source.endswith((".ingot", ".onnx"))
