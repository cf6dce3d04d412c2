"""``ingot deploy``: the capacity that a load needs, and what another system needs to run a server."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ingot.cli.completion import references
from ingot.cli.deploy.capacity import capacity
from ingot.cli.options import StoreOption, with_options
from ingot.cli.output import note
from ingot.cli.settings import chosen, with_settings
from ingot.config import ServerConfig
from ingot.errors import InvalidArgument, write_error

if TYPE_CHECKING:
    from ingot.deploy.plan import Plan, Served

# As ingot.deploy.kserve.Storage, which imports more than --help needs.
Storage = Literal["registry", "modelcar", "native"]

deploy = typer.Typer(help="Plan replicas, and write what another system needs to run them.", no_args_is_help=True)
deploy.command()(capacity)

Models = Annotated[
    list[str],
    typer.Argument(
        help="Archives: oci://host/digits:prod, or digits:prod of the store with --registry; NAME=SOURCE serves one "
        "under another name, and #fp32 that variant.",
        autocompletion=references,
    ),
]
Image = Annotated[str, typer.Option(help="The image of the server, as Dockerfile builds it.")]
Replicas = Annotated[str, typer.Option(metavar="<number>[..<number>]", help="Minimum and maximum replicas.")]
Cpu = Annotated[
    int | None, typer.Option(min=1, help="Cores of a replica.", show_default="--threads for each of --instances, or 2")
]
HasTorch = Annotated[
    bool, typer.Option("--image-has-torch", help="The image has PyTorch; images built from Dockerfile do not.")
]
PullSecret = Annotated[
    str | None, typer.Option(help="A Secret with the credentials of the registries.", show_default="none")
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Write the files into this folder.", show_default="one text on stdout"),
]


@dataclass(frozen=True, kw_only=True)
class Pods:
    """The number and size of the pods, and the registry that they read."""

    registry: Annotated[
        str | None,
        typer.Option("--registry", help="Where pods read archives of the store: oci://host/team.", show_default="none"),
    ] = None
    name: Annotated[str | None, typer.Option(help="The name of all objects.", show_default="the first model's")] = None
    replicas: Replicas = "2..8"
    cpu: Cpu = None
    gpus: Annotated[int, typer.Option(min=0, help="NVIDIA GPUs of a replica.")] = 0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The secrets, the monitoring and the nodes of the cluster."""

    secret: Annotated[
        str | None,
        typer.Option(
            help="A Secret with certificates and keys; settings name its files in /access.", show_default="none"
        ),
    ] = None
    pull_secret: PullSecret = None
    monitoring: Annotated[str, typer.Option(help="The namespace of Prometheus.")] = "monitoring"
    monitor_labels: Annotated[
        list[str] | None,
        typer.Option(
            "--monitor-label",
            help="A label by which Prometheus's operator selects monitors, such as release=prometheus; repeatable.",
        ),
    ] = None
    image_has_torch: HasTorch = False
    node_store: Annotated[
        str | None,
        typer.Option(
            help="A folder of the nodes, such as /var/lib/ingot, that their pods share as their store; archives are "
            "pulled there on each node.",
            show_default="each pod has its own",
        ),
    ] = None


def _plan(
    models: Sequence[str], image: str, pods: Pods, cluster: Cluster, store: Path | None, settings: dict[str, Any]
) -> Plan:
    from ingot.deploy.models import resolve
    from ingot.deploy.plan import Plan, parse_range

    config, variables = _settings(settings, cluster.secret)
    found = resolve(models, pods.registry, store)
    return Plan(
        name=pods.name or _name(found),
        models=found,
        image=image,
        settings=config,
        environment=variables,
        replicas=parse_range(pods.replicas),
        cpu=pods.cpu,
        gpus=pods.gpus,
        secret=cluster.secret,
        pull_secret=cluster.pull_secret,
        monitoring=cluster.monitoring,
        monitor_labels=_labels(cluster.monitor_labels or ()),
        has_torch=cluster.image_has_torch,
        node_store=_absolute(cluster.node_store),
    )


@deploy.command()
@with_settings
@with_options
def k8s(
    models: Models,
    image: Image,
    pods: Pods,
    cluster: Cluster,
    store: StoreOption = None,
    output: Output = None,
    **settings: Any,
) -> None:
    """Print manifests of Kubernetes: Deployment, Service, autoscaler, disruption budget, network policy, monitor.

    The options of ingot serve become variables of the container.

    Examples:

        ingot deploy k8s oci://registry.local:5000/team/digits:prod --image registry.local/ingot:cpu > digits.yaml
        ingot deploy k8s digits:prod --registry oci://registry.local:5000/team --image registry.local/ingot:cpu
    """
    from ingot.deploy import kubernetes

    _write(kubernetes.objects(_plan(models, image, pods, cluster, store, settings)), output)
    _note_tag(image)


@deploy.command()
@with_settings
@with_options
def helm(
    models: Models,
    image: Image,
    pods: Pods,
    cluster: Cluster,
    *,
    store: StoreOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the chart.")],
    **settings: Any,
) -> None:
    """Write a Helm chart: the objects of k8s as templates, and their computed values as values.yaml.

    The options of ingot serve become variables of the container.

    Examples:

        ingot deploy helm oci://registry.local:5000/team/digits:prod --image registry.local/ingot:cpu -o chart
    """
    from ingot.deploy import helm as chart

    _save(chart.files(_plan(models, image, pods, cluster, store, settings)), output)
    _note_tag(image)


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """The way in which pods of KServe get the archive."""

    storage: Annotated[
        Storage,
        typer.Option(
            help="How pods get the archive: registry (KServe's storage initializer pulls it), modelcar or native (an "
            "image holds it; native is mounted by Kubernetes)."
        ),
    ] = "registry"
    model_image: Annotated[
        str | None, typer.Option(help="The image with the archive as /models/model.ingot.", show_default="none")
    ] = None


@deploy.command()
@with_settings
@with_options
def kserve(
    model: Annotated[
        str, typer.Argument(help="An archive: oci://host/digits:prod, or as for k8s.", autocompletion=references)
    ],
    image: Image,
    delivery: Delivery,
    pods: Pods,
    pull_secret: PullSecret = None,
    image_has_torch: HasTorch = False,
    output: Output = None,
    store: StoreOption = None,
    **settings: Any,
) -> None:
    """Print objects of KServe: a network policy, a ServingRuntime that runs Ingot, an InferenceService with one model.

    The options of ingot serve become variables of the container.

    Examples:

        ingot deploy kserve oci://registry.local:5000/team/digits:prod --image registry.local/ingot:cpu > digits.yaml
    """
    from ingot.deploy import kserve

    cluster = Cluster(pull_secret=pull_secret, image_has_torch=image_has_torch)
    plan = _plan([model], image, pods, cluster, store, settings)
    _write(kserve.objects(plan, delivery.storage, delivery.model_image), output)
    _note_tag(image)


@dataclass(frozen=True, kw_only=True)
class Application:
    """The application of Ray Serve, and its replicas."""

    registry: Annotated[
        str | None,
        typer.Option(
            "--registry",
            help="Where replicas read archives of the store: oci://host/team.",
            show_default="the store's folder, which all nodes must see",
        ),
    ] = None
    name: Annotated[
        str | None, typer.Option(help="The name of application and deployment.", show_default="the first model's")
    ] = None
    replicas: Replicas = "1..8"
    cpu: Cpu = None
    num_gpus: Annotated[float, typer.Option("--num-gpus", help="GPUs of a replica, or a share of one: 0.25.")] = 0
    route_prefix: Annotated[str, typer.Option(help="The path in front of /v2.")] = "/"


@deploy.command()
@with_settings
@with_options
def ray(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Archives: oci://host/digits:prod, or digits:prod of the store; NAME=SOURCE serves one under another "
            "name, and #fp32 that variant. An alias is followed, a version is served by its digest.",
            autocompletion=references,
        ),
    ],
    *,
    run: Annotated[
        bool,
        typer.Option("--run", help="Run it on a Ray cluster; return when it is ready.", show_default="print it"),
    ] = False,
    address: Annotated[
        str | None, typer.Option(help="With --run, the cluster.", show_default="the one that runs on this machine")
    ] = None,
    application: Application,
    output: Output = None,
    store: StoreOption = None,
    **settings: Any,
) -> None:
    """Print a configuration of Ray Serve, for serve deploy; or run it on a Ray cluster.

    Options of ingot serve apply to every replica.

    Examples:

        ingot deploy ray digits:prod --replicas 1..8 --num-gpus 0.25 --run
    """
    from ingot.deploy.ray import require_ray
    from ingot.deploy.ray.plan import Plan

    if run:
        require_ray()
    elif address is not None:
        raise InvalidArgument("--address needs --run")
    plan = Plan.of(
        models,
        name=application.name,
        replicas=application.replicas,
        cpu=application.cpu,
        gpus=application.num_gpus,
        route_prefix=application.route_prefix,
        registry=application.registry,
        store=store,
        settings=chosen(settings),
        options=True,
    )
    if plan.store is not None:
        note(f"replicas read {plan.store}, which all nodes of the cluster must see; or name a registry (--registry)")
    if not run:
        _write([plan.document()], output)
        return
    from ingot.deploy.ray import applications

    if lacking := applications.connect(plan, address):
        note(f"the replicas need {lacking}; waiting for more nodes. Ctrl-C ends the wait, not the application")
    applications.run(plan)
    http, grpc = plan.config.http_port, plan.config.grpc_port
    print(f"ready: http://{plan.config.host}:{http}{plan.route_prefix.rstrip('/')} grpc://127.0.0.1:{grpc}")
    note("stop it with serve shutdown, or in Python serve.delete")


def _settings(settings: dict[str, Any], secret: str | None) -> tuple[ServerConfig, dict[str, str]]:
    """Return the settings of the server in a container, and its variables.

    Raises:
        InvalidArgument: a setting has a wrong value, or cannot be had in a container.
    """
    from ingot.deploy.plan import READINESS_FAILURES, READINESS_PERIOD

    given = {"ready_delay": READINESS_PERIOD * READINESS_FAILURES, **chosen(settings), "host": "0.0.0.0"}
    if not given.get("tls_cert"):
        given["insecure"] = True
    config = ServerConfig.of(given, options=True)
    known = ServerConfig.settings()
    for port in ("http_port", "grpc_port"):
        if getattr(config, port) < 1024:
            raise InvalidArgument(f"{known[port].option} must be at least 1024 for a user without privileges")
    if config.tls_client_ca is not None:
        raise InvalidArgument("--tls-client-ca: the probes of Kubernetes have no client certificate; use --auth")
    variables = {}
    for field, value in {**config.changed, "http_port": config.http_port, "grpc_port": config.grpc_port}.items():
        setting = known[field]
        if setting.kind is Path and not str(value).startswith(("/access/", "/tmp/", "/models/")):
            raise InvalidArgument(
                f"{setting.option} {value} is not in the container: name a file of the Secret of --secret, such as "
                f"/access/{Path(value).name}, or in the folders /tmp and /models, which are writable and temporary"
            )
        if str(value).startswith("/access/") and secret is None:
            raise InvalidArgument(f"{setting.option} {value} is in a Secret; name it with --secret")
        variables[setting.variable] = setting.shown(value)
    return config, variables


def _note_tag(image: str) -> None:
    if "@sha256:" not in image:
        note(f"note: a tag can move, so nodes may run different images; name it by its digest: {image}@sha256:...")


def _labels(texts: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, mark, value = text.partition("=")
        if not mark or re.fullmatch(r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", name) is None:
            raise InvalidArgument(f"--monitor-label '{text}' is not a label; write NAME=VALUE: release=prometheus")
        if re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?", value) is None:
            raise InvalidArgument(
                f"--monitor-label '{text}': the value must be at most 63 letters, digits, -, _ and ., and begin and "
                "end with a letter or digit"
            )
        found[name] = value
    return found


def _absolute(folder: str | None) -> str | None:
    if folder is not None and not (folder.startswith("/") and folder.strip("/")):
        raise InvalidArgument(f"--node-store '{folder}' is not an absolute path of a folder, such as /var/lib/ingot")
    return folder


def _name(models: tuple[Served, ...]) -> str:
    from ingot.deploy.plan import object_name

    return object_name(models[0].name)


def _write(objects: Sequence[Mapping[str, Any]], output: Path | None) -> None:
    from ingot.deploy.documents import to_yaml

    if output is None:
        print(to_yaml(objects), end="")
        return
    files = {f"{each.get('kind', 'serve').lower()}.yaml": to_yaml([each]) for each in objects}
    _save(files, output)


def _save(files: Mapping[str, str], folder: Path) -> None:
    try:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    except OSError as error:
        raise write_error(f"cannot write to {folder}", error) from error
    note(f"wrote {', '.join(files)} to {folder}")
