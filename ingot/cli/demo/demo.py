"""``ingot demo``: all stages on real data, with a report of accuracy and speed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.demo import demo_models
from ingot.cli.options import StoreOption
from ingot.cli.output import note, print_json, progress, say, size, stdout
from ingot.errors import Unavailable, missing_package

if TYPE_CHECKING:
    from ingot.bench.measurement import Bench, Point
    from ingot.client.blocking import Client
    from ingot.demo import Data
    from ingot.model_store import Archive
    from ingot.server.main import RunningServer
    from ingot.tensors import Array

_CLIENTS = 32
# The names under which the variants are served.
_SERVED = {"fp32": "digits-fp32", "int8": "digits"}
# If one variant is ahead in all of so many rounds but one at most, chance explains it in 1 of 14 cases.
_ROUNDS = 8


def demo(
    http_port: Annotated[int, typer.Option(help="HTTP port; 0 for any free port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC port; 0 for any free port.")] = 8001,
    once: Annotated[bool, typer.Option("--once", help="Exit after the report instead of continuing to serve.")] = False,
    store: StoreOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Train a small model on handwritten digits, then export, quantize, store and serve it, and print a report.

    Two more models have steps: digit-pictures reads files of pictures, and docstrings is trained on paragraphs of the
    standard library's docstrings and answers what kind of module a text is about. A second run reuses all of them.

    It serves on 127.0.0.1 until Ctrl-C, and prints a curl command to try, unless --once or --json is given. The address
    of the page comes before the measurements: draw a digit there, and both variants answer, or type a text.

    The variants are measured in turn, in 8 rounds. The table has the ratio of the two, as the median and the range of
    the rounds: unclear if the rounds, without the lowest and the highest, disagree on which variant is ahead, and no
    difference for a median within 5 % of 1.

    Examples:

        ingot demo --once
    """
    from ingot.model_store import Store
    from ingot.server.main import serve
    from ingot.server.net.listening import check_port

    for protocol, port in (("HTTP", http_port), ("gRPC", grpc_port)):
        check_port(protocol, "127.0.0.1", port)  # before the training, not after
    where = Store(store)
    try:
        from ingot import demo

        training, held_out = demo.load()
    except ModuleNotFoundError as error:
        raise missing_package(str(error.name), "the demo", "cpu,export,demo") from error
    reference, checkpoint = demo_models.digits(where, training)
    others = demo_models.others(where, checkpoint)
    archive = where.get(reference)
    with serve(
        f"digits={reference}#int8",
        f"digits-fp32={reference}#fp32",
        *(f"{name}={other}" for name, other in others.items()),
        store=where,
        http_port=http_port,
        grpc_port=grpc_port,
    ) as server:
        note(f"Serving at {server.http_url}/ui: open it to draw a digit, to type a text, and to see batches form")
        report = _report(server, archive, demo_models.classes(checkpoint, held_out), held_out)
        if as_json:
            print_json(report)
        else:
            _print(report, reference)
        if not once:
            if not as_json:
                say("Try it:")
                say(_curl(server.http_url, held_out.images[0]))
                say(f"ingot infer {server.http_url} docstrings --input text='Return the number of days in a month.'")
            note("Still serving; Ctrl-C stops.")
            _wait()


def _report(server: RunningServer, archive: Archive, classes: Array, held_out: Data) -> dict[str, Any]:
    """Send every held-out image to the served models over both protocols, and measure them."""
    from ingot.client.blocking import Client

    def accuracy(predicted: Array) -> float:
        return float((predicted == held_out.labels).mean())

    report: dict[str, Any] = {"images": len(held_out.labels), "torch": {"accuracy": accuracy(classes)}}
    with (
        progress("Querying the served models", log=True) as step,
        Client(server.http_url) as http,
        Client(server.grpc_url) as grpc,
    ):
        for variant, name in _SERVED.items():
            predicted = _classes(http, name, held_out.images)
            report[variant] = {
                "accuracy": accuracy(predicted),
                "accuracy_over_grpc": accuracy(_classes(grpc, name, held_out.images)),
                "equal_to_torch": int((predicted == classes).sum()),
                "size": archive.variant(variant).size,
            }
        report |= _of_steps(http, held_out)
        rounds: dict[str, list[dict[str, float]]] = {variant: [] for variant in _SERVED}
        for number in range(_ROUNDS):
            step(f"Measuring, round {number + 1} of {_ROUNDS}")
            for variant in (*_SERVED,) if number % 2 else (*_SERVED,)[::-1]:
                rounds[variant].append(_speed(server, _SERVED[variant]))
    for variant, measured in rounds.items():
        report[variant] |= {key: median(values[key] for values in measured) for key in measured[0]}
    report["int8_to_fp32"] = {
        key: [one[key] / other[key] for one, other in zip(rounds["int8"], rounds["fp32"], strict=True)]
        for key in rounds["fp32"][0]
    }
    return report


def _of_steps(client: Client, held_out: Data) -> dict[str, Any]:
    """Return the accuracy of the models with steps, on files and texts that were not trained on."""
    import numpy as np

    from ingot.demo import docstrings, pictures

    _, texts = docstrings.load()
    named = np.array([docstrings.LABELS[label] for label in texts.labels])
    items = np.array([text.encode() for text in texts.texts], object)
    asked = {
        "digit-pictures": ("image", pictures.files(held_out.images), held_out.labels.astype(str)),
        "docstrings": ("text", items, named),
    }
    found: dict[str, Any] = {}
    for model, (name, values, labels) in asked.items():
        parts = np.array_split(values, 15)
        best = np.concatenate([client.infer(model, {name: part})["label"][:, 0] for part in parts]).astype(str)
        found[model] = {"items": len(values), "accuracy": float((best == labels).mean())}
    return found


def _classes(client: Any, model: str, images: Array) -> Array:
    import numpy as np

    parts = np.array_split(images, 15)
    return np.concatenate([client.infer(model, {"image": part})["logits"].argmax(1) for part in parts])


def _speed(server: RunningServer, model: str) -> dict[str, float]:
    """Measure one variant once, in less than a second."""
    from ingot.bench.measurement import Bench, Rule
    from ingot.bench.target import Target

    found: dict[str, float] = {}
    rule = Rule(window=0.2, warmup=0, windows=1)
    for protocol, url in (("http", server.http_url), ("grpc", server.grpc_url)):
        with Target(url, model) as target:
            payload = target.payload(None, {}, batch=1, seed=1)
            bench = Bench(target, target.plan(payload), payload.samples, rule)
            found[f"{protocol}_ms"] = _measured(bench, 1).quantile(0.5) * 1e3
            if protocol == "http":
                many = _measured(bench, _CLIENTS)
                found |= {f"rate_{_CLIENTS}": many.total.rate, "mean_batch": many.batch or 1.0}
    return found


def _measured(bench: Bench, clients: int) -> Point:
    """Measure until there is an answer, as on a busy machine so short a window may have none."""
    while True:
        point = bench.closed(clients)
        if len(point.total.latencies):
            return point
        if point.total.errors:
            raise Unavailable(f"a request to the demo's server failed: {next(iter(point.total.errors))}")


def _print(report: dict[str, Any], reference: str) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        *("", "fp32", "int8", "int8 / fp32"),
        title=f"{reference} on {report['images']} held-out images (PyTorch: {report['torch']['accuracy']:.2%} right)",
        caption=Text(f"int8 / fp32: median of {_ROUNDS} interleaved rounds [lowest, highest]"),
    )
    rows: list[tuple[str, str, Any]] = [
        ("accuracy over HTTP", "accuracy", lambda value: f"{value:.2%}"),
        ("accuracy over gRPC", "accuracy_over_grpc", lambda value: f"{value:.2%}"),
        ("same as PyTorch", "equal_to_torch", lambda value: f"{value} of {report['images']}"),
        ("size", "size", size),
        ("latency, HTTP (p50)", "http_ms", lambda value: f"{value:.2f} ms"),
        ("latency, gRPC (p50)", "grpc_ms", lambda value: f"{value:.2f} ms"),
        (f"images/s, {_CLIENTS} clients", f"rate_{_CLIENTS}", lambda value: f"{value:,.0f}"),
        ("  mean batch", "mean_batch", lambda value: f"{value:.1f}"),
    ]
    for label, key, shown in rows:
        cells = [shown(report[variant][key]) for variant in _SERVED]
        ratios = report["int8_to_fp32"].get(key)
        table.add_row(label, *cells, difference(ratios) if ratios else "")
    stdout().print(table)
    for model, what in (("digit-pictures", "files of pictures"), ("docstrings", "paragraphs of docstrings")):
        say(f"{model}: {report[model]['accuracy']:.1%} of {report[model]['items']:,} held-out {what} are right")


def difference(ratios: Sequence[float]) -> str:
    """Return the median ratio of paired rounds with its range.

    It is not a difference if the rounds disagree on what is ahead; of eight or more, one on each side may. It is
    "unclear" then, or "no difference" if the median is within 5 % of 1.
    """
    ordered = sorted(ratios)
    agreeing = ordered[1:-1] if len(ordered) > 7 else ordered
    found = f"{median(ratios):.2f}"
    if agreeing[0] <= 1 <= agreeing[-1]:
        found = "no difference" if abs(median(ratios) - 1) <= 0.05 else "unclear"
    return f"{found} [{ordered[0]:.2f}, {ordered[-1]:.2f}]"


def _curl(url: str, image: Array) -> str:
    pixels = ",".join(f"{value:g}" for value in image.reshape(-1).tolist())
    tensor = f'{{"name":"image","datatype":"FP32","shape":[1,1,8,8],"data":[{pixels}]}}'
    return f"curl -s {url}/v2/models/digits/infer -d '{{\"inputs\":[{tensor}]}}'"


def _wait() -> None:
    """Block until Ctrl-C or SIGTERM."""
    import signal
    from threading import Event

    stop = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    while not stop.wait(3600):
        pass
