"""A Helm chart for a plan: the objects of kubernetes.py as templates, with the values that users change."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

from ingot._version import __version__
from ingot.deploy import kubernetes
from ingot.deploy.documents import comment, to_yaml
from ingot.deploy.plan import Plan

# The name of all objects until the text is written; it cannot be part of another value by chance.
_RELEASE: Final = "name-of-the-helm-release"
_CONDITIONS: Final = {
    "HorizontalPodAutoscaler": "autoscaling.enabled",
    "NetworkPolicy": "networkPolicy.enabled",
    "ServiceMonitor": "serviceMonitor.enabled",
}
# Placeholders as PyYAML writes them: a key without a value, a list or map, and a scalar.
_LINE = re.compile(r"^ *'(\{\{.*\}\})': null$", re.MULTILINE)
_BLOCK = re.compile(r"^( *)((?:- )?)(\w+): '\{\{ (toYaml|include) (.*) \}\}'$", re.MULTILINE)
_SCALAR = re.compile(r": '(\{\{ .* \}\})'$", re.MULTILINE)
_ENV = """
{{- define "ingot.env" }}
STATIC
{{- range $name, $value := .Values.env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
"""
_NOTES = """\
{{ .Release.Name }} serves {{ join ", " .Values.models }}.

  kubectl --namespace {{ .Release.Namespace }} rollout status deployment/{{ .Release.Name }}
  kubectl --namespace {{ .Release.Namespace }} port-forward service/{{ .Release.Name }} PORT
  curl SCHEME://127.0.0.1:PORT/v2/health/ready
"""


def files(plan: Plan) -> dict[str, str]:
    """Return the files of a chart by their paths in its folder.

    Raises:
        Unsupported: PyYAML is not installed.
    """
    least, most = plan.replicas
    # An autoscaler is written in any case, as a value may enable it.
    scaled = replace(plan, name=_RELEASE, replicas=(least, max(most, least + 1)), monitor_labels={})
    objects = {each["kind"]: each for each in kubernetes.objects(scaled) if each["kind"] != "DaemonSet"}
    values = _move_values(objects, plan)
    written = {f"templates/{kind.lower()}.yaml": _template(kind, each) for kind, each in objects.items()}
    variables = kubernetes.environment(scaled, **kubernetes.credentials(plan))
    static = to_yaml([{"env": [each for each in variables if "valueFrom" in each]}]).partition("\n")[2].rstrip()
    notes = _NOTES.replace("PORT", str(plan.settings.http_port))
    return {
        "Chart.yaml": to_yaml([_about(plan)]),
        "values.yaml": to_yaml([values]),
        "templates/_env.tpl": _ENV.lstrip().replace("STATIC", static),
        "templates/NOTES.txt": notes.replace("SCHEME", "https" if plan.settings.tls_cert else "http"),
        **written,
    }


def _about(plan: Plan) -> dict[str, Any]:
    return {
        "apiVersion": "v2",
        "name": plan.name,
        "description": f"Ingot with {', '.join(model.name for model in plan.models)}",
        "type": "application",
        "version": __version__,
        "appVersion": plan.models[0].reference.tag or plan.models[0].reference.digest,
        **comment("preStop.sleep"),
        "kubeVersion": ">=1.30.0-0",
    }


def _move_values(objects: dict[str, dict[str, Any]], plan: Plan) -> dict[str, Any]:
    """Replace what users change by placeholders, and return it as the chart's values."""
    deployment, service = objects["Deployment"]["spec"], objects["Service"]
    scaler, policy = objects["HorizontalPodAutoscaler"]["spec"], objects["NetworkPolicy"]["spec"]
    monitor, pod = objects["ServiceMonitor"], deployment["template"]["spec"]
    [container] = pod["containers"]
    values = {
        "image": container["image"],
        **comment("Arguments of ingot serve, and more of them."),
        "models": container["args"][1:],
        "extraArgs": [],
        **comment(
            "Settings of the server. Probes, preStop, resources and metrics were computed from them: after a change of",
            "ready-delay, drain-timeout, instances, threads, slo or a limit, run ingot deploy helm again.",
        ),
        "env": {each["name"]: each["value"] for each in container["env"] if "value" in each},
        **comment("The replicas if autoscaling is off."),
        "replicas": plan.replicas[0],
        "autoscaling": {
            "enabled": plan.replicas[0] < plan.replicas[1],
            "minReplicas": scaler["minReplicas"],
            "maxReplicas": scaler["maxReplicas"],
            **comment("Those of pods need an adapter that serves metrics of Prometheus, such as prometheus-adapter."),
            "metrics": scaler["metrics"],
        },
        "resources": container["resources"],
        "service": {"type": "ClusterIP", "annotations": {}},
        "networkPolicy": {"enabled": True, "ingress": policy["ingress"], "egress": policy["egress"]},
        **comment("Needs Prometheus's operator; labels are those by which it selects monitors."),
        "serviceMonitor": {"enabled": True, "interval": "15s", "labels": dict(plan.monitor_labels)},
        **comment("The store and temporary files; secrets that options named."),
        "volumes": pod["volumes"],
        "podAnnotations": {},
        "nodeSelector": {},
        "tolerations": [],
        "affinity": {},
    }
    container["image"] = "{{ .Values.image | quote }}"
    container["args"] = '{{ toYaml (concat (list "serve") .Values.models .Values.extraArgs) }}'
    container["env"] = '{{ include "ingot.env" . }}'
    container["resources"] = _block("resources")
    pod |= {name: _block(name) for name in ("volumes", "nodeSelector", "tolerations", "affinity")}
    deployment["template"]["metadata"]["annotations"] = _block("podAnnotations")
    # In place of the comment on the autoscaler.
    replicas = (
        '{{- if not .Values.autoscaling.enabled }}{{ printf "replicas: %v" .Values.replicas | nindent 2 }}{{- end }}'
    )
    objects["Deployment"]["spec"] = {replicas: None, **deployment}
    service["metadata"]["annotations"] = _block("service.annotations")
    service["spec"] = {"type": "{{ .Values.service.type }}", **service["spec"]}
    scaler |= {name: f"{{{{ .Values.autoscaling.{name} }}}}" for name in ("minReplicas", "maxReplicas")}
    scaler["metrics"] = _block("autoscaling.metrics")
    policy |= {name: _block(f"networkPolicy.{name}") for name in ("ingress", "egress")}
    monitor["spec"]["endpoints"][0]["interval"] = "{{ .Values.serviceMonitor.interval }}"
    monitor["metadata"]["labels"]["{{- with .Values.serviceMonitor.labels }}{{- toYaml . | nindent 4 }}{{- end }}"] = (
        None
    )
    return values


def _block(path: str) -> str:
    return f"{{{{ toYaml .Values.{path} }}}}"


def _template(kind: str, content: dict[str, Any]) -> str:
    text = _LINE.sub(r"\1", to_yaml([content]))
    text = _SCALAR.sub(r": \1", _BLOCK.sub(_indented, text)).replace(_RELEASE, "{{ .Release.Name }}")
    if kind in _CONDITIONS:
        return f"{{{{- if .Values.{_CONDITIONS[kind]} }}}}\n{text}{{{{- end }}}}\n"
    return text


def _indented(match: re.Match[str]) -> str:
    indent, dash, key, function, rest = match.groups()
    trim = " | trim" if function == "include" else ""
    return f"{indent}{dash}{key}: {{{{- {function} {rest}{trim} | nindent {len(indent + dash) + 2} }}}}"
