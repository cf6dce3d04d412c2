"""Ray Serve: replicas that run Ingot's server without its ports, which Ray's proxies have instead.

Start in plan.py for what is computed from models and settings, and replica.py for what a replica does. ``servicer.py``
runs in Ray's gRPC proxy, ``proxy.py`` in its HTTP proxy, and ``scaling.py`` in Serve's controller.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray import serve


def bind(
    *sources: str,
    name: str | None = None,
    replicas: str = "1",
    cpu: int | None = None,
    num_gpus: float = 0,
    registry: str | None = None,
    store: Path | None = None,
    **settings: Any,
) -> serve.Application:
    """Return the replicas of models, to bind to a deployment that has the ports.

    The handle that it gets has ``infer(model, inputs)``, see :meth:`ingot.deploy.ray.replica.Replica.infer`.

    Args:
        sources: archives, as for ``ingot deploy ray``.
        name: of the deployment; by default that of the first model.
        replicas: the least and the most, such as ``1..8``, or one number.
        cpu: cores of a replica.
        num_gpus: GPUs of a replica, or a share of one.
        registry: where replicas read archives that are named as in the store.
        store: the folder where models without a registry are.
        settings: fields of :class:`ingot.config.ServerConfig`.

    Raises:
        NotFound: there is no such archive.
        InvalidArgument: an argument is wrong.
        Unsupported: Ray is not installed.
    """
    require_ray()
    from ingot.deploy.ray.applications import bound
    from ingot.deploy.ray.plan import Plan
    from ingot.deploy.ray.replica import Replica

    plan = Plan.of(
        sources,
        name=name,
        replicas=replicas,
        cpu=cpu,
        gpus=num_gpus,
        registry=registry,
        store=store,
        settings=settings,
    )
    return bound(plan, Replica)


def require_ray() -> None:
    """Check that Ray Serve can be imported.

    Raises:
        Unsupported: it is not installed.
    """
    from ingot.errors import missing_package

    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise missing_package("ray", "running models on Ray Serve", "ray") from error
