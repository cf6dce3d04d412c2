"""Objects of KServe for a plan: a ServingRuntime that runs Ingot, and an InferenceService with one model."""

from __future__ import annotations

from typing import Any, Final, Literal

from ingot.deploy.documents import comment
from ingot.deploy.kubernetes import environment, ingress, ports, probes, resources, restricted, scratch
from ingot.deploy.plan import Plan, Served
from ingot.errors import InvalidArgument

Storage = Literal["registry", "modelcar", "native"]
"""How a pod gets the archive: KServe's storage initializer pulls it from its registry; or an image holds it, which runs
next to the server (``oci://``) or is mounted by Kubernetes (``oci+native://``, of KServe 0.20)."""
_SCHEMES: Final = {"modelcar": "oci://", "native": "oci+native://"}
_BASES: Final = {
    "modelcar": ", on a base with sh and ln: busybox",
    "native": "; no base is needed: FROM scratch",
}
_FILE = "/mnt/models/model.ingot"
# KServe appends the URI and the folder, which the shell calls 0 and 1.
_FETCH = f'exec ingot copy "oci${{0#ingot}}" "$1/{_FILE.rpartition("/")[2]}"'


def objects(plan: Plan, storage: Storage, model_image: str | None) -> list[dict[str, Any]]:
    """Return the objects of a plan with one model, in the order in which they are best created.

    Args:
        plan: what is run.
        storage: how a pod gets the archive.
        model_image: the image with the archive at ``/models/model.ingot``, unless a registry has it.

    Raises:
        InvalidArgument: there is no such image, or one too many.
    """
    [model] = plan.models
    if (model_image is None) != (storage == "registry"):
        raise InvalidArgument(
            "--model-image is for --storage modelcar and native, which need it; it holds the archive as "
            "/models/model.ingot"
        )
    fetch = [_storage_container(plan)] if storage == "registry" else []
    return [*fetch, _network_policy(plan), _runtime(plan, model), _service(plan, model, storage, model_image)]


def _storage_container(plan: Plan) -> dict[str, Any]:
    """Return the storage initializer for the scheme ``ingot``, which is ``oci`` but for KServe's own use of that."""
    container = {
        "name": "storage-initializer",
        "image": plan.image,
        "command": ["sh", "-c", _FETCH],
        "env": [{"name": "INGOT_HOME", "value": "/tmp/store"}],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}},
        "securityContext": {**restricted(), "readOnlyRootFilesystem": False},
    }
    return {
        **comment("One for the whole cluster; it serves all InferenceServices of Ingot."),
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "ClusterStorageContainer",
        "metadata": {"name": "ingot"},
        "spec": {
            "container": container,
            "supportedUriFormats": [{"prefix": "ingot://"}, {"prefix": "ingot+http://"}],
            "supportsMultiModelDownload": False,
            "workloadType": "initContainer",
        },
    }


def _network_policy(plan: Plan) -> dict[str, Any]:
    """Return who may reach the pods, which KServe labels with the InferenceService's name."""
    return {
        **comment("Add the namespace of the gateway if clients come through one."),
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": plan.name},
        "spec": {
            "podSelector": {"matchLabels": {"serving.kserve.io/inferenceservice": plan.name}},
            "policyTypes": ["Ingress"],
            "ingress": ingress(plan),
        },
    }


def _runtime(plan: Plan, model: Served) -> dict[str, Any]:
    variant = f"#{model.reference.variant}" if model.reference.variant else ""
    container = {
        "name": "kserve-container",
        "image": plan.image,
        **comment("KServe puts the InferenceService's name here, which clients use."),
        "args": ["serve", f"{{{{.Name}}}}={_FILE}{variant}"],
        "env": environment(plan, INGOT_HOME="/tmp/store"),
        "ports": ports(plan),
        "resources": resources(plan),
        **probes(plan),
        "securityContext": restricted(),
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
    }
    if plan.pre_stop:
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": plan.pre_stop}}}
    return {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "ServingRuntime",
        "metadata": {"name": plan.name},
        "spec": {
            "annotations": {"prometheus.kserve.io/port": str(plan.settings.http_port)},
            "supportedModelFormats": [{"name": "ingot", "version": "1"}],
            "protocolVersions": ["v2", "grpc-v2"],
            "containers": [container],
            **comment("The archive is unpacked into /tmp."),
            "volumes": [{"name": "scratch", **scratch(plan)}],
        },
    }


def _service(plan: Plan, model: Served, storage: Storage, model_image: str | None) -> dict[str, Any]:
    pull = {"imagePullSecrets": [{"name": plan.pull_secret}]} if plan.pull_secret else {}
    if storage == "registry":
        place = str(model.reference).removeprefix("oci").partition("#")[0]
        about, uri = comment("the archive in its registry, by digest"), f"ingot{place}"
    else:
        about = comment(
            "Its image: the file that `ingot copy` writes, as /models/model.ingot" + _BASES[storage],
        )
        uri = f"{_SCHEMES[storage]}{model_image}"
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": plan.name,
            "annotations": {
                **comment("Deployment and Service, which have both ports; Knative allows one."),
                "serving.kserve.io/deploymentMode": "Standard",
                "ingot/archive": str(model.reference),
            },
        },
        "spec": {
            "predictor": {
                "minReplicas": plan.replicas[0],
                "maxReplicas": plan.replicas[1],
                "automountServiceAccountToken": False,
                **pull,
                "terminationGracePeriodSeconds": plan.grace,
                "model": {
                    "modelFormat": {"name": "ingot", "version": "1"},
                    "protocolVersion": "v2",
                    "runtime": plan.name,
                    **about,
                    "storageUri": uri,
                },
            }
        },
    }
