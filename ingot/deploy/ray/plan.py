"""What Ray Serve runs, with the values that follow from the models and the server's settings. Ray is not needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ingot.config import ServerConfig
from ingot.config.exposure import OFF
from ingot.deploy.documents import comment
from ingot.deploy.models import resolve
from ingot.deploy.plan import Served, held_memory, object_name, parse_range, used_cores
from ingot.errors import InvalidArgument
from ingot.model_store import Store

_PACKAGE: Final = "ingot.deploy.ray"
# Ray's proxies have the ports, so whatever a server does with connections and their requests is without effect.
_OF_PORTS: Final = (
    *("grpc_server", "tls_cert", "tls_key", "tls_client_ca", "auth", "cors_origin", "allowed_host", "shared_memory"),
    *("access_log", "otlp", "audit_log", "log_control", "management", "management_grpc", "ready_delay"),
    *("max_connections", "max_in_flight", "max_rate", "share_port", "sticky_header"),
)
_LISTENING: Final = ("host", "http_port", "grpc_port", "insecure", "page")
# Seconds for a replica to close its models after its requests are answered.
_CLOSING = 20
# Serve's controller learns the waits that often.
_LOOK_BACK, _UP, _DOWN = 20, 5, 300


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An application of Ray Serve with one deployment, whose replicas each run the same models.

    Attributes:
        name: of the application and the deployment.
        models: at least one.
        config: the server's settings.
        replicas: the least and the most.
        cpu: cores of a replica; None for as many as the settings use.
        gpus: GPUs of a replica, or a share of one.
        route_prefix: the path in front of ``/v2``.
        store: the folder where replicas find models without a registry.

    Raises:
        InvalidArgument: a setting has no effect behind Ray's proxies, or the GPUs do not fit it.
    """

    name: str
    models: tuple[Served, ...]
    config: ServerConfig
    replicas: tuple[int, int] = (1, 1)
    cpu: int | None = None
    gpus: float = 0
    route_prefix: str = "/"
    store: str | None = None

    def __post_init__(self) -> None:
        known = ServerConfig.settings()
        for name in _OF_PORTS:
            value, setting = getattr(self.config, name), known[name]
            if value != setting.default and (name, value) != ("management", OFF):  # replicas have none anyway
                called = name if setting.file_only else f"{setting.option} ({setting.variable})"
                raise InvalidArgument(
                    f"{called} has no effect behind the proxies of Ray Serve, which have the ports; leave it out"
                )
        if self.replicas[1] > 1 and (self.config.states or any(model.sequential for model in self.models)):
            raise InvalidArgument(
                "states (--states, or of an archive): requests of one sequence would reach several replicas; use "
                "--replicas 1, or ingot serve"
            )
        if not self.gpus >= 0 or (self.gpus > 1 and self.gpus != int(self.gpus)):
            raise InvalidArgument(
                f"--num-gpus {self.gpus:g} is not a number of GPUs that Ray assigns: write a share of one, such as "
                "0.25, or a whole number"
            )
        if self.gpus and self.config.device == "cpu":
            raise InvalidArgument(f"--num-gpus {self.gpus:g} and --device cpu contradict each other; leave one out")
        if not self.gpus and self.config.device == "cuda":
            raise InvalidArgument(
                "--device cuda needs GPUs, which Ray assigns: add --num-gpus 1, or a share such as 0.25"
            )
        if not self.route_prefix.startswith("/"):
            raise InvalidArgument(f"--route-prefix '{self.route_prefix}' must begin with a slash")

    @classmethod
    def of(
        cls,
        sources: Sequence[str],
        *,
        name: str | None = None,
        replicas: str = "1",
        cpu: int | None = None,
        gpus: float = 0,
        route_prefix: str = "/",
        registry: str | None = None,
        store: Path | None = None,
        settings: Mapping[str, Any],
        options: bool = False,
    ) -> Plan:
        """Return the plan for what a user names.

        Args:
            sources: archives.
            name: by default that of the first model.
            replicas: such as ``1..8``, or one number.
            cpu: see :class:`Plan`.
            gpus: see :class:`Plan`.
            route_prefix: see :class:`Plan`.
            registry: where replicas read archives that are named as in the store.
            store: the store; None for the user's.
            settings: of the server, by name.
            options: whether the user gave them as options of the command.

        Raises:
            NotFound: there is no such archive.
            InvalidArgument: an argument is wrong.
        """
        models = resolve(sources, registry, store, shared=True)
        if not models:
            raise InvalidArgument("nothing to deploy; name an archive such as digits:prod")
        local = any(model.reference.registry is None for model in models)
        return cls(
            name=name or object_name(models[0].name),
            models=models,
            config=ServerConfig.of(settings, options=options),
            replicas=parse_range(replicas),
            cpu=cpu,
            gpus=gpus,
            route_prefix=route_prefix,
            store=str(Store(store).root.absolute()) if local else None,
        )

    @property
    def cores(self) -> int:
        return self.cpu or used_cores(self.config)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that replicas are started with; running replicas are replaced when they change."""
        config = self.config
        own = {name: value for name, value in config.changed.items() if name not in _LISTENING}
        own["device"] = "cuda" if self.gpus else "cpu"
        if config.threads is None and not self.gpus:
            own["threads"] = max(1, self.cores // config.instances)
        return {"settings": own, **({"store": self.store} if self.store else {})}

    @property
    def options(self) -> dict[str, Any]:
        """The options of the deployment; those that run take up another ``user_config`` without a restart."""
        waiting = self.config.max_queue * len(self.models)
        return {
            **comment("Requests wait in the queues of the replicas, which form batches, and not in Ray's proxies;"),
            **comment("the rest is for the batches that run."),
            "max_ongoing_requests": waiting + self.config.max_batch * self.config.instances * len(self.models),
            **comment("Those that wait in one proxy while no replica is ready."),
            "max_queued_requests": waiting,
            **comment("A change of models is loaded, tested and takes over in the replicas, without a restart."),
            "user_config": {"models": [model.source for model in self.models]},
            # Also for a fixed number: replicas that start without it never report waits, whatever they are changed to.
            "autoscaling_config": self._scaling,
            "ray_actor_options": {
                "num_cpus": self.cores,
                **({"num_gpus": self.gpus} if self.gpus else {}),
                **comment("bytes that a replica holds once its models are loaded"),
                "memory": held_memory(self.models, self.config),
            },
            **comment(f"{self.config.drain_timeout:g} s drain-timeout, and some to end"),
            "graceful_shutdown_timeout_s": self.config.drain_timeout + _CLOSING,
        }

    @property
    def _scaling(self) -> dict[str, Any]:
        least, most = self.replicas
        target = min(model.wait_at(self.config) for model in self.models)
        return {
            "min_replicas": least,
            "max_replicas": most,
            "look_back_period_s": _LOOK_BACK,
            "upscale_delay_s": _UP,
            "downscale_delay_s": _DOWN,
            "policy": {
                "policy_function": f"{_PACKAGE}.scaling:ExpectedWait",
                **comment("seconds that a request waits for an engine, from which replicas are added"),
                "policy_kwargs": {"target": round(target, 6)},
            },
        }

    @property
    def http_options(self) -> dict[str, Any]:
        return {"host": self.config.host, "port": self.config.http_port}

    @property
    def grpc_options(self) -> dict[str, Any]:
        return {
            "port": self.config.grpc_port,
            "grpc_servicer_functions": [f"{_PACKAGE}.servicer.add_to_server"],
        }

    def document(self) -> Mapping[str, Any]:
        """Return the file that ``serve deploy`` reads."""
        return {
            **comment("`serve deploy serve.yaml` makes a Ray cluster run exactly the applications of this file."),
            "proxy_location": "EveryNode",
            **comment("No TLS and no keys: the cluster's network decides who reaches the ports."),
            "http_options": self.http_options,
            **comment("Ray's gRPC proxy listens on all addresses of a node."),
            "grpc_options": self.grpc_options,
            "applications": [
                {
                    "name": self.name,
                    "route_prefix": self.route_prefix,
                    "import_path": f"{_PACKAGE}.applications:application",
                    "args": {"name": self.name, **self.arguments},
                    "deployments": [{"name": self.name, **self.options}],
                }
            ],
        }
