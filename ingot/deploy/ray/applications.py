"""Applications of Ray Serve: of a file that it deploys, of a program, and on a running cluster."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve

from ingot._version import __version__
from ingot.deploy.documents import plain
from ingot.deploy.ray.plan import Plan
from ingot.deploy.ray.replica import Ingress, Replica
from ingot.errors import InvalidArgument, Unavailable, shortened

# Seconds to connect to a cluster.
_REACH = 5.0


def application(args: Mapping[str, Any]) -> serve.Application:
    """Return the application of a file that ``ingot deploy ray`` wrote; Serve adds the deployment's options from there.

    Args:
        args: the name of the deployment, and the arguments of its replicas.
    """
    arguments = {**args}
    return serve.deployment(Ingress, name=arguments.pop("name")).bind(**arguments)


def bound(plan: Plan, kind: type[Replica]) -> serve.Application:
    """Return the application of a plan, whose replicas are of a kind."""
    deployment = serve.deployment(kind, name=plan.name).options(
        **plain(plan.options),
        # Otherwise Serve replaces all replicas each time; applications of a file have the version of their arguments.
        version=f"{__version__} {plan.arguments}",
        _internal=True,
    )
    return deployment.bind(**plan.arguments)


def connect(plan: Plan, address: str | None) -> str:
    """Connect to a Ray cluster, if this process is not connected yet; return what it lacks to run a plan, if anything.

    Args:
        plan: what is to run.
        address: of the cluster; None for the one that runs on this machine.

    Raises:
        Unavailable: there is no such cluster.
    """
    if not ray.is_initialized():
        try:
            _reach(address)
            ray.init(address or "auto", log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError) as error:
            where = f"at {address} ({shortened(str(error))})" if address else "on this machine"
            raise Unavailable(
                f"no Ray cluster runs {where}; start one with ray start --head, or name another with --address"
            ) from error
    needed = {"CPU": plan.cores, "GPU": plan.gpus}
    found = ray.cluster_resources()
    least = plan.replicas[0]
    return ", ".join(
        f"{least * count:g} {kind} (it has {found.get(kind, 0):g})"
        for kind, count in needed.items()
        if least * count > found.get(kind, 0)
    )


def _reach(address: str | None) -> None:
    """Check that something listens at ``host:port``: Ray itself would try for minutes, and then end the process.

    Raises:
        OSError: nothing does.
    """
    host, _, port = (address or "").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _REACH).close()


def run(plan: Plan, proxies: str = "EveryNode") -> None:
    """Run a plan on the cluster of :func:`connect` until its replicas are ready; it stays when this process ends.

    Args:
        plan: what is run; an application of the same name becomes that.
        proxies: the nodes with ports, if Serve does not run yet: ``EveryNode`` or ``HeadOnly``.

    Raises:
        Unavailable: the replicas do not become ready.
        InvalidArgument: Serve refuses an option.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxies, http_options=plan.http_options, grpc_options=plan.grpc_options)
    try:
        serve.run(bound(plan, Ingress), name=plan.name, route_prefix=plan.route_prefix)
    except ValueError as error:
        raise InvalidArgument(f"Ray Serve refuses the application: {error}") from error
    except RuntimeError as error:
        raise Unavailable(f"application '{plan.name}' does not run: {_reason(plan.name) or error}") from error


def _reason(name: str) -> str:
    """Return why the replicas of an application do not start: the error in the traceback that Serve keeps."""
    application = serve.status().applications.get(name)
    deployments = application.deployments.values() if application is not None else ()
    lines = [line.strip() for each in deployments for line in each.message.splitlines()]
    return next((line for line in reversed(lines) if "Error: " in line or line.startswith("ingot.errors.")), "")
