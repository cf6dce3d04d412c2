"""TorchServe: one worker process behind its Java front, batches formed there."""

import json
import os
import sys
from pathlib import Path

from arguments import engine, free_ports, parse

# Without it TorchServe writes several lines for each request.
LOGGING = """<Configuration><Appenders><Console name="out"/></Appenders>
<Loggers><Root level="warn"><AppenderRef ref="out"/></Root></Loggers></Configuration>"""

if __name__ == "__main__":
    options = parse()
    work = Path(options.work)
    folder = work / "store" / options.name
    (folder / "MAR-INF").mkdir(parents=True)
    manifest = {
        "runtime": "python",
        "archiverVersion": "0.12.0",
        "model": {"modelName": options.name, "handler": "handler.py:handle", "modelVersion": "1.0"},
    }
    (folder / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest))
    (folder / "handler.py").write_text("from server import handle\n")
    batch = {"batchSize": options.batch, "maxBatchDelay": max(1, round(options.delay)), "responseTimeout": 60}
    models = {
        options.name: {
            "1.0": {"defaultVersion": True, "marName": options.name, "minWorkers": 1, "maxWorkers": 1, **batch}
        }
    }
    management, metrics, grpc_management = free_ports(3, (options.port, options.grpc_port))
    ports = {"inference": options.port, "management": management, "metrics": metrics}
    lines = [f"{name}_address=http://127.0.0.1:{port}" for name, port in ports.items()]
    lines += [f"grpc_inference_port={options.grpc_port}", f"grpc_management_port={grpc_management}"]
    lines += ["disable_token_authorization=true", "enable_envvars_config=false", "job_queue_size=1000"]
    lines += [
        f"models={json.dumps(models)}",
        "load_models=all",
        "install_py_dep_per_model=false",
        "disable_system_metrics=true",
    ]
    (work / "config.properties").write_text("\n".join(lines))
    os.environ["PYTHONPATH"] += f":{Path(__file__).parent}"
    os.environ["LOG_LOCATION"] = os.environ["METRICS_LOCATION"] = str(work)
    os.environ["TEMP"] = str(work)
    command = ["torchserve", "--start", "--foreground", "--model-store", str(work / "store"), "--ncs"]
    command += ["--ts-config", str(work / "config.properties"), "--disable-token-auth"]
    (work / "log4j2.xml").write_text(LOGGING)
    command += ["--log-config", str(work / "log4j2.xml")]
    os.execv(str(Path(sys.executable).parent / "torchserve"), command)

import orjson  # noqa: E402

_engine = None


def handle(data, context):
    """Answer a batch: rows of JSON, which TorchServe has parsed or not, or raw bytes."""
    global _engine
    if _engine is None:
        _engine = engine()
    if data is None:
        return None
    bodies = [row.get("body") if row.get("body") is not None else row.get("data") for row in data]
    raw = [isinstance(body, (bytes, bytearray)) for body in bodies]
    samples = [
        _engine.of_bytes(bytes(body)) if is_raw else _engine.of_json(body)
        for body, is_raw in zip(bodies, raw, strict=True)
    ]
    rows = _engine.batch(samples)
    return [
        row.tobytes() if is_raw else orjson.dumps({_engine.output: row.tolist()}).decode()
        for row, is_raw in zip(rows, raw, strict=True)
    ]
