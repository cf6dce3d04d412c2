"""Send mutated pictures and sounds to a server, next to requests of tensors for another of its models.

``python -m benchmarks.reliability.decoders --seconds 600`` fuzzes the decoders through the port: JPEG, PNG, WebP, GIF,
BMP and TIFF of all modes, WAV, FLAC and OGG, with changed, cut, doubled and exchanged bytes. Windows with and without
the files take turns, so that both see the same machine. The report has the answers by status, how many decoder
processes ended, and the p99 of the neighbour, as a ratio. The exit status is 0 only if the process with the ports
stayed the same, and each request was answered by 200, 4xx, or an error that says that its decoder process ended.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import struct
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow

from benchmarks.serving.processes import served
from ingot.steps import audio_classification
from ingot.steps.images.pictures import drawn
from ingot.steps.sounds.synthesis import synthesized
from tests.server import test_image_steps, test_sound_steps

_WINDOW = 5.0
# Requests a second of the neighbour: few enough that it never waits for itself.
_PACE = 100.0
_EXTREME = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)
_LOST = "ended"
_INPUTS = {"colour": "image", "level": "audio"}


def seeds() -> dict[str, list[bytes]]:
    """Return valid files by the model that accepts them, of all formats and modes."""
    return {"colour": _pictures(), "level": [*synthesized(24)]}


def _pictures() -> list[bytes]:
    """Return pictures, also animated, progressive and compressed ones."""
    found = [*drawn(48)]
    for kind, mode, options in _FORMS:
        picture = Pillow.frombytes("RGB", (40, 30), random.Random(0).randbytes(3600)).convert(mode)
        file = BytesIO()
        picture.save(file, kind, **options(picture))
        found.append(file.getvalue())
    return found


def _animated(picture: Any) -> dict[str, Any]:
    return {"save_all": True, "append_images": [picture.rotate(90), picture.rotate(180)]}


_FORMS: Sequence[tuple[str, str, Callable[[Any], dict[str, Any]]]] = (
    ("GIF", "P", _animated),
    ("WEBP", "RGBA", _animated),
    ("TIFF", "RGB", _animated),
    ("JPEG", "RGB", lambda picture: {"progressive": True}),
    ("JPEG", "CMYK", lambda picture: {}),
    ("WEBP", "RGB", lambda picture: {"lossless": True}),
    ("PNG", "I;16", lambda picture: {}),
    *(
        ("TIFF", "RGB", lambda picture, name=name: {"compression": name})
        for name in ("tiff_lzw", "tiff_deflate", "jpeg", "packbits")
    ),
    ("TIFF", "1", lambda picture: {"compression": "group4"}),
)


def mutated(content: bytes, others: Sequence[bytes], dice: random.Random) -> bytes:
    """Return a file with a few faults: bytes, numbers of headers, parts that are cut, doubled or from another file."""
    changed = bytearray(content)
    for _ in range(dice.choice((1, 1, 2, 4, 16))):
        place = dice.randrange(min(len(changed), dice.choice((64, 1 << 30))) or 1)
        kind = dice.randrange(6)
        if kind == 0:
            changed[place : place + 1] = bytes([dice.randrange(256)])
        elif kind == 1:
            form = dice.choice(("B", "<H", ">H", "<I", ">I"))
            number = dice.choice(_EXTREME) % (1 << 8 * struct.calcsize(form))
            changed[place : place + struct.calcsize(form)] = struct.pack(form, number)
        elif kind == 2:
            del changed[place : place + dice.randrange(1, 64)]
        elif kind == 3:
            changed[place:place] = changed[place : place + dice.randrange(1, 512)] * dice.choice((1, 2, 50))
        elif kind == 4:
            other = dice.choice(others)
            start = dice.randrange(len(other))
            changed[place : place + 64] = other[start : start + dice.randrange(1, 512)]
        elif dice.random() < 0.3:
            del changed[place + 1 :]
    return bytes(changed) or b"\0"


class Target:
    """A connection to a server with the models ``colour``, of pictures, ``level``, of sounds, and a neighbour."""

    def __init__(self, port: int):
        self._port = port
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, model: str, name: str, datatype: str, shape: Sequence[int], raw: bytes) -> tuple[int, str]:
        """Send one tensor; return the status, and the text of an error."""
        size = {"binary_data_size": len(raw)}
        tensor = {"name": name, "datatype": datatype, "shape": [*shape], "parameters": size}
        head = json.dumps({"inputs": [tensor]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        self._connection.request("POST", f"/v2/models/{model}/infer", head + raw, headers)
        response = self._connection.getresponse()
        body = response.read()
        return response.status, "" if response.status == 200 else body.decode(errors="replace")

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    def file(self, model: str, content: bytes) -> tuple[int, str]:
        """Ask one of the models of files."""
        return self.ask(model, _INPUTS[model], "BYTES", [1], struct.pack("<I", len(content)) + content)

    def tensor(self) -> tuple[int, str]:
        """Ask the neighbour."""
        pixels = np.ones((1, 3, 8, 8), np.float32)
        return self.ask("neighbour", "pixel_values", "FP32", pixels.shape, pixels.tobytes())

    def metric(self, name: str) -> float:
        """Return the sum of a metric."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)) as connection:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


class Fuzzer(threading.Thread):
    """Sends mutated files while ``on`` is set, and counts the answers by model and status."""

    def __init__(
        self,
        target: Target,
        files: Mapping[str, Sequence[bytes]],
        seed: int,
        on: threading.Event,
        over: threading.Event,
    ):
        super().__init__(daemon=True)
        self.answers: Counter[str] = Counter()
        self.faults: list[str] = []
        self._files = files
        self._target, self._dice, self._on, self._over = target, random.Random(seed), on, over

    def run(self) -> None:
        files = self._files
        while not self._over.is_set():
            if not self._on.wait(0.1):
                continue
            model = self._dice.choice([*files])
            content = mutated(self._dice.choice(files[model]), files[model], self._dice)
            try:
                status, text = self._target.file(model, content)
            except (OSError, http.client.HTTPException) as error:
                self.faults.append(f"no answer: {error!r}")
                break
            lost = status == 503 and _LOST in text
            self.answers[f"{model}: {'its decoder process ended' if lost else status}"] += 1
            if not (lost or status == 200 or 400 <= status < 500):
                self.faults.append(f"{status}: {text[:300]}")
        self._target.close()


def neighbour(target: Target, seconds: float) -> list[float]:
    """Ask the neighbour at a steady pace; return the seconds of each answer, counted from when it was due."""
    found, began = list[float](), time.perf_counter()
    while (due := len(found) / _PACE) < seconds:
        time.sleep(max(0.0, began + due - time.perf_counter()))
        status, text = target.tensor()
        if status != 200:
            raise SystemExit(f"the neighbour was answered {status}: {text}")
        found.append(time.perf_counter() - began - due)
    return found


@contextlib.contextmanager
def serving() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield the process of a server with the models, and its port."""
    with tempfile.TemporaryDirectory() as work:
        colour = Path(work) / "colour.ingot"
        test_image_steps.make(Path(work)).save(colour)
        described = audio_classification(test_sound_steps.LEVELS, rate=test_sound_steps.RATE)
        level = test_sound_steps.make("level", described, Path(work), test_sound_steps.sound(0.5))
        with served([f"colour={colour}", f"level={level}", f"neighbour={colour}"]) as (found, process):
            yield process, int(found["http"].rpartition(":")[2])


def measure(seconds: float, clients: int, seed: int, window: float = _WINDOW) -> dict[str, Any]:
    """Run a server under mutated files; return what happened."""
    files = seeds()
    with serving() as (server, port), contextlib.closing(Target(port)) as target:
        on, over = threading.Event(), threading.Event()
        fuzzers = [Fuzzer(Target(port), files, seed + number, on, over) for number in range(clients)]
        for fuzzer in fuzzers:
            fuzzer.start()
        times: dict[bool, list[float]] = {False: [], True: []}
        neighbour(target, 1)  # warm
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            for fuzzing in (False, True):
                (on.set if fuzzing else on.clear)()
                times[fuzzing] += neighbour(target, window)
        over.set()
        for fuzzer in fuzzers:
            fuzzer.join(60)
        faults = [fault for fuzzer in fuzzers for fault in fuzzer.faults]
        faults += ["a request has no answer after a minute" for fuzzer in fuzzers if fuzzer.is_alive()]
        if server.poll() is not None:
            faults.append("the process with the ports ended")
        alone, beside = (float(np.percentile(times[fuzzing], 99)) for fuzzing in (False, True))
        return {
            "seconds": round(time.perf_counter() - began),
            "answers": dict(sum((fuzzer.answers for fuzzer in fuzzers), Counter())),
            "processes that ended": target.metric("ingot_engine_restarts_total"),
            "neighbour": {"alone_p99_ms": 1e3 * alone, "beside_p99_ms": 1e3 * beside, "ratio": beside / alone},
            "faults": faults,
        }


def main() -> None:
    """Measure, and print the result as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability.decoders", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = measure(options.seconds, options.clients, options.seed)
    print(json.dumps(found, indent=1))
    if found["faults"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
