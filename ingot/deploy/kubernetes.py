"""Plain objects of Kubernetes for a plan, and of Prometheus's operator for its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ingot.deploy.documents import comment
from ingot.deploy.plan import READINESS_FAILURES, READINESS_PERIOD, Plan

_USER = 10001  # of the images that Dockerfile builds; any other works as well
_ACCESS, _CREDENTIALS = "/access", "/credentials"
_BUSY_CORES = 80
"""Percent of the requested cores from which replicas are added."""


def objects(plan: Plan) -> list[dict[str, Any]]:
    """Return the objects of a plan, in the order in which they are best created."""
    scaled = [_autoscaler(plan)] if plan.replicas[0] < plan.replicas[1] else []
    prefetch = [_prefetch(plan)] if plan.node_store else []
    made = _network_policy(plan), *prefetch, _service(plan), _deployment(plan), _budget(plan), *scaled, _monitor(plan)
    return list(made)


def environment(plan: Plan, **more: str) -> list[dict[str, Any]]:
    """Return the server's variables, those of the plan first."""
    found = {"INGOT_HOST": "0.0.0.0", "INGOT_HOME": "/models", **more, **plan.environment}
    notes = {"INGOT_INSECURE": "No TLS and no keys: the NetworkPolicy decides who reaches the ports."}
    replica = {"name": "INGOT_REPLICA", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    return [
        *([replica] if "INGOT_REPLICA" not in found else []),
        *(
            # Kubernetes reads $(NAME) as a variable, and $$ as $.
            {**(comment(notes[name]) if name in notes else {}), "name": name, "value": value.replace("$", "$$")}
            for name, value in found.items()
        ),
    ]


def credentials(plan: Plan) -> dict[str, str]:
    """Return the variables by which a server finds the credentials of the registries."""
    return {"DOCKER_CONFIG": _CREDENTIALS} if plan.pull_secret else {}


def probes(plan: Plan) -> dict[str, Any]:
    """Return the three probes of the server's container."""
    scheme = {"scheme": "HTTPS"} if plan.settings.tls_cert else {}

    def get(path: str) -> dict[str, Any]:
        return {"httpGet": {"path": path, "port": "http", **scheme}, "timeoutSeconds": 3}

    return {
        **comment(f"up to {plan.startup_failures * plan.startup_period} s to pull, load and test the models"),
        "startupProbe": {
            **get("/v2/health/ready"),
            "periodSeconds": plan.startup_period,
            "failureThreshold": plan.startup_failures,
        },
        "readinessProbe": {
            **get("/v2/health/ready"),
            "periodSeconds": READINESS_PERIOD,
            "failureThreshold": READINESS_FAILURES,
        },
        "livenessProbe": {**get("/v2/health/live"), "periodSeconds": 10, "failureThreshold": 3},
    }


def resources(plan: Plan) -> dict[str, Any]:
    """Return the resources that a container requests. Without a limit, the server would use all cores of the node."""
    gpus = {"nvidia.com/gpu": str(plan.gpus)} if plan.gpus else {}
    return {
        "requests": {"cpu": str(plan.cores), "memory": _mebibytes(plan.memory_request), **gpus},
        "limits": {"cpu": str(plan.cores), "memory": _mebibytes(plan.memory_limit), **gpus},
    }


def restricted() -> dict[str, Any]:
    """Return the security context of a container, as the standard ``restricted`` has it, with a read-only root."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def scratch(plan: Plan) -> dict[str, Any]:
    """Return the volume of temporary files, which holds unpacked archives."""
    return {"emptyDir": {"sizeLimit": _mebibytes(plan.store_limit)}}


def ports(plan: Plan) -> list[dict[str, Any]]:
    """Return the container's ports."""
    return [
        {"name": "http", "containerPort": plan.settings.http_port},
        {"name": "grpc", "containerPort": plan.settings.grpc_port},
    ]


def _labels(plan: Plan) -> dict[str, str]:
    return {"app.kubernetes.io/name": "ingot", "app.kubernetes.io/instance": plan.name}


def _object(version: str, kind: str, plan: Plan, spec: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": plan.name, "labels": _labels(plan)},
        "spec": dict(spec),
    }


def _deployment(plan: Plan) -> dict[str, Any]:
    scaled = plan.replicas[0] < plan.replicas[1]
    spec = {
        **(comment("The HorizontalPodAutoscaler sets the replicas.") if scaled else {"replicas": plan.replicas[0]}),
        "selector": {"matchLabels": _labels(plan)},
        **comment("A new pod is ready before an old one leaves."),
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "progressDeadlineSeconds": plan.startup_failures * plan.startup_period + 60,
        "template": {"metadata": {"labels": _labels(plan)}, "spec": _pod(plan)},
    }
    return _object("apps/v1", "Deployment", plan, spec)


def _pod(plan: Plan) -> dict[str, Any]:
    wait = f"{plan.pre_stop} s preStop, {plan.settings.ready_delay:g} s ready-delay"
    return {
        **_pod_defaults(plan),
        **comment(f"{wait}, {plan.settings.drain_timeout:g} s drain-timeout, and some to end"),
        "terminationGracePeriodSeconds": plan.grace,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": _labels(plan)},
            }
        ],
        "containers": [_container(plan)],
        "volumes": _volumes(plan),
    }


def _pod_defaults(plan: Plan) -> dict[str, Any]:
    pull = {"imagePullSecrets": [{"name": plan.pull_secret}]} if plan.pull_secret else {}
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **pull,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _prefetch(plan: Plan) -> dict[str, Any]:
    """Return the container that pulls the archives into each node's store before the server starts."""
    labels = {**_labels(plan), "app.kubernetes.io/name": "ingot-prefetch"}  # not those that the Service selects
    shared = {
        "image": plan.image,
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": restricted(),
    }
    pulls = [
        {
            "name": f"pull-{number}",
            "args": ["copy", str(replace(model.reference, variant=None))],
            "env": environment(plan, **credentials(plan)),
            "volumeMounts": _mounts(plan),
            **shared,
        }
        for number, model in enumerate(plan.models)
    ]
    pod = {
        **_pod_defaults(plan),
        "initContainers": pulls,
        "containers": [{"name": "idle", "command": ["sleep", "infinity"], **shared}],
        "volumes": _volumes(plan),
    }
    spec = {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}}
    found = _object("apps/v1", "DaemonSet", plan, spec)
    found["metadata"] = {"name": f"{plan.name}-prefetch", "labels": labels}
    return found


def _mounts(plan: Plan) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [{"name": "store", "mountPath": "/models"}, {"name": "scratch", "mountPath": "/tmp"}]
    if plan.secret:
        mounts.append({"name": "access", "mountPath": _ACCESS, "readOnly": True})
    if plan.pull_secret:
        mounts.append({"name": "credentials", "mountPath": _CREDENTIALS, "readOnly": True})
    return mounts


def _container(plan: Plan) -> dict[str, Any]:
    return {
        "name": "server",
        "image": plan.image,
        "args": ["serve", *(model.source for model in plan.models)],
        "env": environment(plan, **credentials(plan)),
        "ports": ports(plan),
        "resources": resources(plan),
        **probes(plan),
        **_lifecycle(plan),
        "securityContext": restricted(),
        "volumeMounts": _mounts(plan),
    }


def _lifecycle(plan: Plan) -> dict[str, Any]:
    if not plan.pre_stop:
        return {}
    return {
        **comment(
            f"A pod that leaves gets requests for up to {plan.leaving} s; the server's ready-delay covers "
            f"{plan.settings.ready_delay:g} s."
        ),
        "lifecycle": {"preStop": {"sleep": {"seconds": plan.pre_stop}}},
    }


def _volumes(plan: Plan) -> list[dict[str, Any]]:
    store = (
        {"hostPath": {"path": plan.node_store, "type": "Directory"}}
        if plan.node_store
        else {"emptyDir": {"sizeLimit": _mebibytes(plan.store_limit)}}
    )
    found: list[dict[str, Any]] = [
        {"name": "store", **store},
        {"name": "scratch", **scratch(plan)},
    ]
    if plan.secret:
        found.append({"name": "access", "secret": {"secretName": plan.secret, "defaultMode": 0o440}})
    if plan.pull_secret:
        items = [{"key": ".dockerconfigjson", "path": "config.json"}]
        secret = {"secretName": plan.pull_secret, "defaultMode": 0o440, "items": items}
        found.append({"name": "credentials", "secret": secret})
    return found


def _service(plan: Plan) -> dict[str, Any]:
    scheme = ("https", "grpc") if plan.settings.tls_cert else ("http", "kubernetes.io/h2c")
    spec = {
        "selector": _labels(plan),
        "ports": [
            {"name": "http", "port": plan.settings.http_port, "targetPort": "http", "appProtocol": scheme[0]},
            {"name": "grpc", "port": plan.settings.grpc_port, "targetPort": "grpc", "appProtocol": scheme[1]},
        ],
    }
    return _object("v1", "Service", plan, spec)


def _budget(plan: Plan) -> dict[str, Any]:
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": _labels(plan)},
    }
    return _object("policy/v1", "PodDisruptionBudget", plan, spec)


def _autoscaler(plan: Plan) -> dict[str, Any]:
    metrics = [
        {
            "type": "Pods",
            "pods": {
                "metric": {
                    "name": "ingot_in_flight_requests",
                    "selector": {"matchLabels": {"model": model.name}},
                },
                **comment(*_reason(plan, model.latency)),
                "target": {"type": "AverageValue", "averageValue": str(model.busy_at(plan.settings))},
            },
        }
        for model in plan.models
    ]
    # Without an adapter, the autoscaler still adds replicas by this one.
    processor = {
        "type": "Resource",
        "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": _BUSY_CORES}},
    }
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": plan.name},
        "minReplicas": plan.replicas[0],
        "maxReplicas": plan.replicas[1],
        **comment(
            "A metrics adapter, such as prometheus-adapter with its default rules, provides the metrics of pods.",
            "The use of the CPU needs none.",
        ),
        "metrics": [*metrics, processor],
        "behavior": {
            "scaleUp": {"policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}]},
            "scaleDown": {"stabilizationWindowSeconds": 300},
        },
    }
    return _object("autoscaling/v2", "HorizontalPodAutoscaler", plan, spec)


def _reason(plan: Plan, latency: Mapping[int, float]) -> tuple[str, ...]:
    if not latency:
        return (f"two batches of max-batch ({plan.settings.max_batch}): the archive records no latency",)
    if plan.settings.slo is not None:
        return (f"unanswered requests that take half of the slo of {plan.settings.slo:g} s, at the recorded latencies",)
    return ("two batches of the size with the highest recorded throughput",)


def _network_policy(plan: Plan) -> dict[str, Any]:
    spec = {
        "podSelector": {"matchLabels": _labels(plan)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress(plan),
        "egress": [
            {
                **comment("names"),
                "ports": [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")],
            },
            {
                **comment("the registry, and where it redirects to"),
                "ports": [{"port": port, "protocol": "TCP"} for port in plan.registry_ports],
            },
        ],
    }
    return _object("networking.k8s.io/v1", "NetworkPolicy", plan, spec)


def ingress(plan: Plan) -> list[dict[str, Any]]:
    """Return the rules of a NetworkPolicy for those who may reach the ports."""
    http, grpc = {"port": "http", "protocol": "TCP"}, {"port": "grpc", "protocol": "TCP"}
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": plan.monitoring}}}
    return [
        {**comment("clients: pods of this namespace"), "from": [{"podSelector": {}}], "ports": [http, grpc]},
        {**comment("Prometheus"), "from": [monitoring], "ports": [http]},
    ]


def _monitor(plan: Plan) -> dict[str, Any]:
    endpoint: dict[str, Any] = {"port": "http", "path": "/metrics", "interval": "15s"}
    if plan.settings.tls_cert:
        ca = {"secret": {"name": plan.secret, "key": "ca.crt"}}
        endpoint |= {"scheme": "https", "tlsConfig": {"serverName": plan.name, "ca": ca}}
    if plan.settings.auth:
        endpoint |= {
            **comment("An API key with the scope metrics, in the same Secret."),
            "authorization": {"credentials": {"name": plan.secret, "key": "metrics-key"}},
        }
    spec = {"selector": {"matchLabels": _labels(plan)}, "endpoints": [endpoint]}
    found = _object("monitoring.coreos.com/v1", "ServiceMonitor", plan, spec)
    found["metadata"]["labels"].update(plan.monitor_labels)
    return found


def _mebibytes(count: int) -> str:
    return f"{-(-count >> 20)}Mi"
