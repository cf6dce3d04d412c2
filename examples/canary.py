"""Canary and shadow: a bad version is noticed before clients get its answers, and a good one takes over.

    python -m examples.canary

The server follows an alias. First a new version only gets copies of requests (a shadow, a step of 0), and is rolled
back because its answers differ; then a retrained version that agrees takes over step by step.
"""

import itertools
import time
from typing import Any

import ingot
from ingot.demo import Digits, load, train

RULES: dict[str, Any] = {
    "canary": "0,50",  # steps: only copies of requests, then half of the requests, then all
    "canary_every": "1s",
    "canary_compare": 100,
    "canary_drift": 20,  # percent of the answers that may differ
    "canary_tolerance": 0.5,
}


def main() -> None:
    """Push three versions and promote two of them while requests arrive."""
    training, held_out = load()
    net = train(training, epochs=4)
    store = ingot.Store("store")
    for version, module in enumerate((net, Digits().eval(), train(training, epochs=5)), 1):
        archive = ingot.export_model(
            module, inputs="image:float32[batch,1,8,8]", output_names=["logits"], name="digits"
        )
        store.push(archive, f"digits:{version}")
    store.promote("digits:1", "prod")
    with (
        ingot.serve("digits:prod", store=store, http_port=0, grpc_port=0, **RULES) as server,
        ingot.Client(server.http_url) as client,
    ):
        images = itertools.cycle(held_out.images[:, None])
        for version in (2, 3):
            before = client.metadata("digits")["properties"]["digest"]
            store.promote(f"digits:{version}", "prod")
            end = time.monotonic() + 60
            while time.monotonic() < end:
                client.infer("digits", {"image": next(images)})
                properties = client.metadata("digits")["properties"]
                if "update_failed" in properties and version == 2:
                    print(f"version {version} was refused: {properties['update_failed']}")
                    break
                if properties["digest"] != before:
                    print(f"version {version} answers")
                    break


if __name__ == "__main__":
    main()
