"""Models that are classes in Python, through real servers: answers, faults, and where their code may not run."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import ingot
from ingot.cli.serving.serve import curl
from ingot.errors import (
    ExportError,
    IngotError,
    InternalError,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unsupported,
)
from ingot.export.python_model import export_class
from ingot.model_store import BlobFolder
from ingot.model_store.format import manifest
from ingot.runtime.engines.opening import open_engine
from ingot.runtime.engines.python import files
from ingot.runtime.engines.spec import EngineSpec
from ingot.server.main import RunningServer
from tests import onnx_models
from tests.model_store.forgeries import forged
from tests.server.outside import wait_until
from tests.support import FREE_PORTS, RequireTool, RunIngot, refused, succeeded

WORDS = """
import re
from typing import TypedDict

class Inputs(TypedDict):
    text: list[str]

class Outputs(TypedDict):
    count: list[int]
    first: list[str]

class Words:
    def load(self, context):
        self.pattern = re.compile((context.files / "data" / "pattern.txt").read_text())

    def predict(self, batch: Inputs) -> Outputs:
        found = [self.pattern.findall(text) for text in batch["text"]]
        first = [words[0] if words else ValueError("the text has no words") for words in found]
        return {"count": [len(words) for words in found], "first": first}

    def example(self):
        return {"text": ["two words", "one"]}
"""

# Each input makes it fail in one way.
FAULTY = """
import os, sys, time, asyncio, logging, socket

class Mute(Exception):
    def __str__(self):
        return self.missing

class Faulty:
    inputs = ["do:str[batch]"]
    outputs = ["y:float32[batch]"]

    def load(self, context):
        self.context = context
        self.leaked = []

    def predict_one(self, sample):
        do = sample["do"]
        if do == "raise":
            raise KeyError("no such key")
        if do == "reject":
            raise ValueError("the text is not a command")
        if do == "print":
            for _ in range(1 << 10):
                print("x" * (1 << 20))
        if do == "stderr":
            print("a line for the log", file=sys.stderr)
        if do == "log":
            logging.getLogger("odd").error("%d", "no number")
            logging.getLogger("odd").error("half \\ud800")
        if do == "exit":
            sys.exit(3)
        if do == "mute":
            raise Mute
        if do == "surrogate":
            raise KeyError("\\ud800")
        if do == "cancel":
            raise asyncio.CancelledError
        if do == "base":
            raise BaseException("odd")
        if do == "_exit":
            os._exit(3)
        if do == "fork":
            os.fork()
        if do == "connect":
            socket.create_connection(("127.0.0.1", 80))
        if do == "fetch":
            from urllib.request import urlopen
            urlopen("http://127.0.0.1:80")
        if do == "write":
            open("/tmp/ingot-was-here", "w")
        if do == "kill":
            os.kill(os.getppid(), 9)
        if do == "text":
            return "no number"
        if do == "leak":
            self.leaked.append(bytearray(1 << 20))
        if do == "hang":
            while True:
                time.sleep(1)
        if do == "temporary":
            import tempfile
            with tempfile.TemporaryFile() as file:
                file.write(b"x")
        return 1.0
"""

ARRAYS = """
import asyncio
from typing import Annotated
import numpy as np

class Arrays:
    inputs = ["x:float32[batch,2]", "image:bytes[batch]"]
    outputs = ["y:float32[batch,n]", "size:int64[batch]", "copy:bytes[batch]"]

    async def predict(self, batch):
        await asyncio.sleep(0)
        assert isinstance(batch["x"], np.ndarray) and isinstance(batch["image"][0], bytes)
        return {"y": batch["x"] * 2, "size": [len(item) for item in batch["image"]], "copy": batch["image"]}

class Slow:
    async def predict_one(self, seconds: float) -> int:
        if seconds < 0:
            raise asyncio.CancelledError
        await asyncio.sleep(seconds)
        return 7

class Wrong:
    inputs = ["n:int64[batch]"]
    outputs = ["y:int64[batch]"]

    def predict(self, batch):
        return {0: {"y": [1, 2, 3]}, 1: {"z": [1]}, 2: [[1.5]], 3: {"y": 1}, 4: {"y": ["a"]}}[int(batch["n"][0])]

class Half:
    inputs = ["n:int64[batch]"]
    outputs = ["y:str[batch]"]

    def predict(self, batch):
        return {"y": ["\\ud800"]}

Large = Annotated[np.ndarray, "float32[batch,262144]"]

class Big:
    def predict(self, x: Large) -> Large:
        x += 1
        return x
"""


def write(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def words(folder: Path) -> str:
    write(folder, "data/pattern.txt", r"\w+")
    return f"{write(folder, 'words_model.py', WORDS)}:Words"


def source_of(folder: Path, content: str, name: str) -> str:
    return f"{write(folder, f'{name.lower()}_model.py', content)}:{name}"


@contextlib.contextmanager
def serving(*sources: str | ingot.Archive, **settings: Any) -> Iterator[RunningServer]:
    with ingot.serve(*sources, http_port=0, grpc_port=0, device="cpu", **settings) as server:
        yield server


def text(*items: str) -> dict[str, Any]:
    return {"text": np.array([item.encode() for item in items], object)}


def do(what: str) -> dict[str, Any]:
    return {"do": np.array([what.encode()], object)}


def is_ready(server: RunningServer, name: str) -> bool:
    return httpx.get(f"{server.http_url}/v2/models/{name}/ready", trust_env=False).status_code == 200


def wait_ready(server: RunningServer, name: str) -> None:
    wait_until(lambda: is_ready(server, name))


def engine_processes() -> list[int]:
    """Return the engine processes of the servers in this one."""
    children = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")).split()
    return [int(each) for each in children if b"isolation.child" in Path(f"/proc/{each}/cmdline").read_bytes()]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_class_answers_batches_of_texts(tmp_path: Path, protocol: str) -> None:
    with (
        serving(words(tmp_path)) as server,
        ingot.Client(server.http_url if protocol == "http" else server.grpc_url) as client,
    ):
        answer = client.infer("words", text("a b c", "x"))
        assert answer["count"].tolist() == [3, 1]
        assert answer["first"].tolist() == [b"a", b"x"]
        assert client.metadata("words")["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [-1]}]
        with pytest.raises(InvalidArgument, match="rejects this input: the text has no words"):
            client.infer("words", text("a", ".."))
        with pytest.raises(InvalidArgument, match="a text of input 'text' is not valid UTF-8"):
            client.infer("words", {"text": np.array([b"\xff"], object)})


def test_the_first_requests_of_a_user_are_answered(
    tmp_path: Path, run_ingot: RunIngot, require_tool: RequireTool
) -> None:
    """The command that serve prints sends the example's first sample, and a text needs no form of JSON."""
    require_tool("curl")
    with serving(words(tmp_path)) as server, ingot.Client(server.http_url) as client:
        [model] = server._server.repository
        command = curl(server.http_url, model)
        assert '"shape":[1],"data":["' in command
        done = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
        assert b'"outputs"' in done.stdout, (command, done.stdout)
        file = write(tmp_path, "a.txt", "of file")
        for typed, count in (("a good day", [3]), ('["a", "b c"]', [1, 2]), (f"@{file}", [2])):
            done_by = run_ingot("infer", server.http_url, "words", "--json", "--input", f"text={typed}")
            assert json.loads(succeeded(done_by))["outputs"]["count"] == count
        with pytest.raises(InvalidArgument, match="input 'text' is empty, and has datatype FP64 instead of BYTES"):
            client.infer("words", {"text": np.array([])})


def test_an_example_with_quotes_is_sent_and_one_without_json_is_not(tmp_path: Path) -> None:
    for example, shown in (("it's ä", "it'\\''s ä"), (b"\xff", ""), ("a" * 5000, "")):
        code = (
            "class M:\n    def predict_one(self, x: bytes) -> int: return len(x)\n"
            f"    def example(self): return {example!r}\n"
        )
        with serving(source_of(tmp_path, code, "M")) as server:
            [model] = server._server.repository
            command = curl(server.http_url, model)
            assert shown in command if shown else not command


def test_a_file_without_its_class_names_the_classes(tmp_path: Path) -> None:
    file, _, _ = words(tmp_path).rpartition(":")
    with pytest.raises(InvalidArgument, match=r"name its class: ingot serve \S+words_model\.py:Words$"), serving(file):
        pass


def test_a_sample_that_fails_in_a_shared_batch_fails_alone(tmp_path: Path) -> None:
    with serving(words(tmp_path), max_delay=0.3) as server, ingot.Client(server.http_url) as client:

        def ask(index: int) -> Any:
            try:
                return client.infer("words", text("..." if index == 5 else "a " * index))["count"].tolist()
            except InvalidArgument as error:
                return str(error)

        with ThreadPoolExecutor(12) as pool:
            found = [*pool.map(ask, range(1, 13))]
        assert [each for index, each in enumerate(found, 1) if index != 5] == [[n] for n in range(1, 13) if n != 5]
        assert "the text has no words" in found[4]
        statistics = client.statistics("words")[0]
        assert int(statistics["execution_count"]) < int(statistics["inference_count"])  # requests shared a batch


def test_the_same_class_runs_in_a_notebook(tmp_path: Path) -> None:
    words(tmp_path)
    code = (
        "from pathlib import Path; from types import SimpleNamespace; from words_model import Words; import sys;"
        "m = Words(); m.load(SimpleNamespace(files=Path('.'))); print(m.predict(m.example()));"
        "assert 'ingot' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout == "{'count': [2, 1], 'first': ['two', 'one']}\n"


def test_arrays_pass_in_both_directions_and_coroutines_run_at_once(tmp_path: Path) -> None:
    file = write(tmp_path, "arrays_model.py", ARRAYS)
    sources = (f"{file}:{name}" for name in ("Arrays", "Slow", "Half", "Big"))
    with serving(*sources) as server, ingot.Client(server.http_url) as client:
        x, image = np.ones((2, 2), np.float32), np.array([b"\x00\xff", b""], object)
        answer = client.infer("arrays", {"x": x, "image": image})
        assert answer["y"].tolist() == [[2, 2], [2, 2]]
        assert answer["size"].tolist() == [2, 0]
        assert answer["copy"].tolist() == [b"\x00\xff", b""]
        began = time.monotonic()
        assert client.infer("slow", {"seconds": np.full(20, 0.2)})["output"].tolist() == [7] * 20
        assert time.monotonic() - began < 3
        with pytest.raises(InternalError, match="a text in 'y' that UTF-8 cannot encode"):
            client.infer("half", {"n": np.ones(1, np.int64)})
        with pytest.raises(InternalError, match="raised CancelledError"):
            client.infer("slow", {"seconds": np.full(1, -1.0)})
        big = np.zeros((3, 262144), np.float32)
        assert np.array_equal(client.infer("big", {"x": big})["output"], big + 1)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (0, "Wrong.predict returned 3 results in 'y' for 1 samples"),
        (1, "returned 'z', but the model's signature has 'y'"),
        (2, "returned 'y' as float64, declared is y:int64[batch]; cast it there"),
        (3, "returned a int as 'y', not an array"),
        (4, "returned 'y' as text, declared is y:int64"),
    ],
)
def test_results_that_do_not_fit_are_named(wrong: RunningServer, case: int, message: str) -> None:
    with ingot.Client(wrong.http_url) as client, pytest.raises(IngotError, match=r"Wrong\.predict") as caught:
        client.infer("wrong", {"n": np.array([case])})
    assert message in str(caught.value)
    assert caught.value.code.value == "internal"


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    file = write(tmp_path_factory.mktemp("wrong"), "arrays_model.py", ARRAYS)
    with serving(f"{file}:Wrong") as server:
        yield server


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("faulty")
    source = source_of(folder, FAULTY, "Faulty")
    with serving(source, str(onnx_models.affine(folder)), engine_timeout=2.0) as server:
        yield server


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("raise", InternalError, "the model failed: KeyError: 'no such key'"),
        ("reject", InvalidArgument, "the model rejects this input: the text is not a command"),
        ("exit", InternalError, "the code ends the process (SystemExit: 3)"),
        ("mute", InternalError, "Mute: its message cannot be read (AttributeError in __str__)"),
        ("surrogate", InternalError, "KeyError: "),
        ("cancel", InternalError, "the code raised CancelledError, which is not an Exception"),
        ("base", InternalError, "the code raised BaseException, which is not an Exception"),
        ("_exit", Unavailable, "ended with exit code 3; the request may have caused it"),
        ("hang", IngotError, "engine call"),
        ("fork", InternalError, "starts no programs"),
        ("connect", InternalError, "has no network"),
        ("fetch", InternalError, "has no network"),
        ("write", InternalError, "writes only to its temporary folder"),
        ("kill", InternalError, "PermissionError"),
        ("text", InternalError, "returned 'y' as text, declared is y:float32[batch]"),
    ],
)
def test_a_fault_costs_its_request_only(faulty: RunningServer, what: str, error: type, message: str) -> None:
    with ingot.Client(faulty.http_url) as client:
        with pytest.raises(error) as caught:
            client.infer("faulty", do(what))
        assert message in str(caught.value)
        assert "Traceback" not in str(caught.value)
        assert client.infer("affine", {"x": np.ones((1, 3), np.float32)})["y"].shape == (1, 3)
        wait_ready(faulty, "faulty")
        assert client.infer("faulty", do("temporary"))["y"].tolist() == [1.0]


def test_prints_and_places_of_failures_are_in_the_log(faulty: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with ingot.Client(faulty.http_url, timeout=60) as client:
        client.infer("faulty", do("print"))
        assert "more lines were not kept" in caplog.text
        assert len(caplog.text) < 1 << 16
        client.infer("faulty", do("stderr"))
        assert "stderr: a line for the log" in caplog.text
        with pytest.raises(InternalError):
            client.infer("faulty", do("raise"))
    line = FAULTY.splitlines().index('            raise KeyError("no such key")') + 1
    assert f"Faulty.predict_one raised KeyError: 'no such key' (faulty_model.py, line {line})" in caplog.text


def test_odd_lines_of_a_models_log_cost_nothing(faulty: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with ingot.Client(faulty.http_url) as client:
        assert client.infer("faulty", do("log"))["y"].tolist() == [1.0]
    assert "odd: TypeError: %d format: a real number is required" in caplog.text
    assert "odd: half ?" in caplog.text


def test_a_killed_process_costs_its_batch_only(faulty: RunningServer) -> None:
    with ingot.Client(faulty.http_url) as client:
        found: list[Exception] = []

        def ask() -> None:
            try:
                client.infer("faulty", do("hang"))
            except IngotError as error:
                found.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.5)
        for process in engine_processes():
            os.kill(process, signal.SIGKILL)
        thread.join(30)
        assert len(found) == 1
        assert "SIGKILL" in str(found[0])
        wait_ready(faulty, "faulty")
        assert client.infer("faulty", do("")) is not None


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("class M:\n    pass\n", "class M has neither predict"),
        ("class M:\n    def predict(self, batch): ...\n", "the inputs and outputs of M are not known: declare them"),
        ("class M:\n    def predict(self, x: dict) -> list[str]: ...\n", "the type hint dict of 'x' in M.predict"),
        ("def M(): ...\n", "m_model.py has no class 'M'"),
        ("N = 1\n", "m_model.py has no class 'M'"),
        ("import no_such_package\n", "m_model.py cannot be imported: ModuleNotFoundError"),
        ("class M\n", "m_model.py cannot be imported: SyntaxError"),
        (
            "class M:\n    def load(self, c):\n        1 / 0\n    def predict_one(self, x: str) -> str: ...\n",
            "M.load raised ZeroDivisionError: division by zero (m_model.py, line 3)",
        ),
        (
            "import sys\nclass M:\n    def load(self, c): sys.exit(1)\n    def predict_one(self, x: str) -> str: ...\n",
            "M.load raised ExitRequested: the code ends the process (SystemExit: 1)",
        ),
        (
            "import asyncio\nclass M:\n    def load(self, c): raise asyncio.CancelledError\n"
            "    def predict_one(self, x: str) -> str: ...\n",
            "M.load raised BaseRaised: the code raised CancelledError",
        ),
        (
            "import asyncio\nclass M:\n    async def example(self): raise asyncio.CancelledError\n"
            "    def predict_one(self, x: str) -> str: ...\n",
            "M.example raised BaseRaised: the code raised CancelledError",
        ),
        ("import asyncio\nraise asyncio.CancelledError\n", "m_model.py cannot be imported: BaseRaised"),
        (
            "class M:\n    def example(self): return 'a'\n    def predict_one(self, x: str) -> str: raise KeyError\n",
            "the example of model 'm' fails: sample 0: the model failed: KeyError: ; change or remove it",
        ),
        (
            "class M:\n    def example(self): return ['a']\n    def predict(self, x: list[str]) -> list[str]: 1 / 0\n",
            "the example of model 'm' fails: the model failed: ZeroDivisionError: division by zero",
        ),
        ("class M:\n    def predict(self, x: list[str]) -> list[str]: yield 'a'\n", "M.predict yields: only"),
        ("class M:\n    inputs = ['x:float32[4]']\n    outputs = ['y:int64[batch]']\n    def predict(self, b): ...\n",
         "must have 'batch' as its first dimension"),
        ("class M:\n    inputs = ['x:str[batch]', 'x:int64[batch]']\n    outputs = ['y:int64[batch]']\n"
         "    def predict(self, b): ...\n", "'x' is declared twice"),
        ("import os\nos._exit(4)\n", "ended with exit code 4 while it loaded the model"),
    ],
)  # fmt: skip
def test_a_class_that_cannot_be_served_is_refused_with_the_reason(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(IngotError) as caught, serving(source_of(tmp_path, code, "M")):
        pass
    assert message in str(caught.value)


def test_an_archive_answers_as_the_file_and_needs_consent(tmp_path: Path, run_ingot: RunIngot) -> None:
    source, out = words(tmp_path), tmp_path / "words.ingot"
    succeeded(run_ingot("export", source, "--include", tmp_path / "data", "-o", out))
    shown = succeeded(run_ingot("inspect", out))
    assert "can run its author's code" in shown
    assert "text:string[batch]" in shown
    assert "Words of words_model.py, with 2 files" in shown
    moved = tmp_path / "elsewhere" / "w.ingot"
    moved.parent.mkdir()
    out.rename(moved)
    (tmp_path / "data" / "pattern.txt").unlink()
    with serving(str(moved), allow_code=True, isolate="none") as server, ingot.Client(server.http_url) as client:
        assert client.infer("words", text("a b"))["count"].tolist() == [2]
        assert httpx.get(f"{server.http_url}/v2/models/words", trust_env=False).json()["platform"] == "python"


def test_an_archive_that_lacks_a_file_or_is_random_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"pattern\.txt.*--include"):
        export_class(words(tmp_path), name="words")
    random = (
        "import os\nclass M:\n    def predict_one(self, x: str) -> str: return os.urandom(8).hex()\n"
        "    def example(self): return 'a'\n"
    )
    with pytest.raises(ExportError, match="does not answer the example as the file does"):
        export_class(source_of(tmp_path, random, "M"), name="m")


def test_relative_paths_are_of_the_models_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive that reads what lies in the current folder of its author answers on no other machine."""
    source = words(tmp_path)
    code = (tmp_path / "words_model.py").read_text()
    write(
        tmp_path,
        "words_model.py",
        code.replace('(context.files / "data" / "pattern.txt").read_text()', 'open("data/pattern.txt").read()'),
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExportError, match=r"data/pattern\.txt.*--include"):
        export_class(source, name="words")
    export_class(source, name="words", include=[tmp_path / "data"]).save(tmp_path / "w.ingot")
    monkeypatch.chdir("/")
    for served in (source, str(tmp_path / "w.ingot")):
        with serving(served, allow_code=True) as server, ingot.Client(server.http_url) as client:
            assert client.infer("words", text("a b"))["count"].tolist() == [2]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"files": {"a": "0" * 64, "a/b/c.py": "0" * 64}, "file": "a"}, "'a' is a file, and the folder of 'a/b/c.py'"),
        ({"files": {"a" * 300: "0" * 64}, "file": "a" * 300}, "longer than file systems allow"),
        ({"files": {"a/" * 2500 + "a": "0" * 64}, "file": "a"}, "longer than file systems allow"),
        ({"files": {"../a": "0" * 64}, "file": "../a"}, "not a path inside the model's folder"),
    ],
)
def test_an_archive_with_paths_that_cannot_be_unpacked(
    tmp_path: Path, run_ingot: RunIngot, plan: dict[str, Any], message: str
) -> None:
    serving = export_class(words(tmp_path), name="words", include=[tmp_path / "data"]).variant().serving
    blobs, raw = BlobFolder.scratch(), json.dumps({"attribute": "Words", **plan}).encode()
    graph = blobs.put(raw, manifest.WEIGHT, {manifest.FILEPATH: "python.json"})
    forged(blobs, serving, graph).save(path := tmp_path / "m.ingot")
    shown = run_ingot("inspect", path)
    assert message in refused(shown)
    assert shown.stdout == ""
    assert message in refused(run_ingot("serve", path, "--allow-code", *FREE_PORTS))


def test_another_version_of_python_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = words(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("platform.python_version", lambda: "2.7.1")
        export_class(source, name="words", include=[tmp_path / "data"]).save(tmp_path / "w.ingot")
    caplog.clear()
    with serving(str(tmp_path / "w.ingot"), allow_code=True):
        pass
    assert "the archive was made with Python 2.7.1, and runs in 3." in caplog.text


def test_a_difference_names_the_files_that_changed(tmp_path: Path, run_ingot: RunIngot) -> None:
    for name, pattern in (("before", r"\w+"), ("after", r"\w")):
        source = words(tmp_path)
        write(tmp_path, "data/pattern.txt", pattern)
        export_class(source, name="words", include=[tmp_path / "data"]).save(tmp_path / f"{name}.ingot")
    shown = run_ingot("diff", tmp_path / "before.ingot", tmp_path / "after.ingot").stdout
    assert "file data/pattern.txt" in shown
    assert "file words_model.py" not in shown


def test_changed_goldens_are_noticed(tmp_path: Path) -> None:
    code = "import time\nclass M:\n    def predict_one(self, x: str) -> int: return OFFSET + len(x)\n"
    code += "    def example(self): return ['abc', '']\n"
    source = source_of(
        tmp_path, f"from pathlib import Path\nOFFSET = len(Path('/tmp/{tmp_path.name}').exists() * 'a')\n" + code, "M"
    )
    archive = export_class(source, name="m")
    archive.save(tmp_path / "m.ingot")
    flag = Path(f"/tmp/{tmp_path.name}")
    flag.touch()
    try:
        with (
            pytest.raises(InternalError, match="does not reproduce its golden outputs"),
            serving(str(tmp_path / "m.ingot"), allow_code=True),
        ):
            pass
    finally:
        flag.unlink()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("numpy==0.1\nno-such-package==1.0  # a comment\n", "numpy==0.1 (2"),
        ("no-such-package==1.0\n", "no-such-package==1.0 (it is not installed): pip install no-such-package==1.0"),
        ("numpy>=1\n", "requirements.txt, line 1: 'numpy>=1' is not of the form name==version"),
    ],
)
def test_requirements_are_checked(tmp_path: Path, run_ingot: RunIngot, lines: str, message: str) -> None:
    source = source_of(tmp_path, "class M:\n    def predict_one(self, x: str) -> str: return x\n", "M")
    requirements = write(tmp_path, "requirements.txt", lines)
    found = refused(run_ingot("export", source, "--requirements", requirements, "-o", tmp_path / "m.ingot"))
    assert message in " ".join(found.split())


def test_the_code_of_an_archive_runs_in_no_process_without_consent(tmp_path: Path, run_ingot: RunIngot) -> None:
    """Each entry is tried with an archive whose code ends its process, and leaves a trace if that is not confined."""
    trace, armed = tmp_path / "trace", tmp_path / "armed"
    code = (
        f"import os\ntry:\n    os.mkdir({str(trace)!r})\nexcept OSError:\n    pass\n"
        f"if os.path.exists({str(armed)!r}): os._exit(77)\n"
        "class M:\n    def predict_one(self, x: str) -> str: return x\n    def example(self): return 'a'\n"
    )
    export_class(source_of(tmp_path, code, "M"), name="m").save(out := tmp_path / "m.ingot")
    assert not trace.exists()  # the export confines it, too
    armed.touch()
    succeeded(run_ingot("copy", out, "m:1"))
    commands: list[list[str | Path]] = [
        ["serve", out, *FREE_PORTS], ["serve", "m:1", *FREE_PORTS], ["inspect", out],
        ["inspect", f"{out}#python", "--replay"],
        ["diff", out, out], ["compare", out, out], ["quantize", out, "-o", tmp_path / "q.ingot"],
        ["graph", out, "-o", tmp_path / "g.html"],
        ["profile", out], ["export", out, "-o", tmp_path / "e.ingot"], ["store", "list"],
        ["deploy", "k8s", "m:1", "--image", "ingot"],
        ["deploy", "capacity", "m:1", "--rate", "10", "--slo", "p99=1s", "--measure"],
    ]  # fmt: skip
    for command in commands:
        result = run_ingot(*command)
        assert not trace.exists(), command
        assert "exit code 77" not in result.stdout + result.stderr, command
        if command[0] in ("serve", "compare", "profile") or command[1] == "capacity":
            assert "--allow-code" in result.stderr, command
    with pytest.raises(InternalError, match="engine process only"):
        open_engine(EngineSpec(Path(source_of(tmp_path, code, "M")), format="python", allow_code=True))
    assert "ended with exit code 77" in refused(run_ingot("serve", out, "--allow-code", *FREE_PORTS))
    assert not trace.exists()


def test_a_request_loads_code_only_with_consent(tmp_path: Path) -> None:
    source, out = words(tmp_path), tmp_path / "words.ingot"
    export_class(source, name="words", include=[tmp_path / "data"]).save(out)
    affine = str(onnx_models.affine(tmp_path))
    for consent in (False, True):
        with serving(affine, allow_code=consent, management=str(tmp_path / f"m{consent}")) as server:
            transport = httpx.HTTPTransport(uds=str(tmp_path / f"m{consent}"))
            with httpx.Client(transport=transport, base_url="http://ingot", timeout=60) as management:
                for name, wanted in (("a", source), ("b", str(out))):
                    answer = management.post(
                        f"/v2/repository/models/{name}/load", json={"parameters": {"source": wanted}}
                    )
                    assert answer.is_success is consent, answer.text
                    assert consent or "--allow-code" in answer.text
            if consent:
                with ingot.Client(server.http_url) as client:
                    assert client.infer("a", text("a b"))["count"].tolist() == [2]


def test_a_model_that_keeps_memory_is_replaced_between_two_calls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = source_of(tmp_path, FAULTY, "Faulty")
    with serving(source, engine_memory_mb=512) as server, ingot.Client(server.http_url) as client:
        for _ in range(700):  # of 1 MiB each
            assert client.infer("faulty", do("leak"))["y"].tolist() == [1.0]
        assert "was replaced: it had grown to" in caplog.text
        assert "of the 512 MiB that it may have (--engine-memory-mb)" in caplog.text
        assert "it is started again" not in caplog.text


def test_health_is_readiness(tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    code = (
        f"import os\nclass M:\n    def predict_one(self, x: str) -> str: return x\n"
        f"    def health(self):\n        if os.path.exists({str(sick)!r}): raise RuntimeError('no licence')\n"
    )
    with serving(source_of(tmp_path, code, "M")) as server, ingot.Client(server.http_url, retries=0) as client:
        x = {"x": np.array([b"a"], object)}
        assert client.infer("m", x)["output"].tolist() == [b"a"]
        sick.touch()
        wait_until(lambda: not is_ready(server, "m"))
        with pytest.raises(Unavailable, match="not healthy: RuntimeError: no licence"):
            client.infer("m", x)
        sick.unlink()
        wait_until(lambda: is_ready(server, "m"))
        assert client.infer("m", x)["output"].tolist() == [b"a"]


def test_a_model_that_became_unfit_while_it_was_tested_is_not_ready(tmp_path: Path) -> None:
    code = (
        "import time\nclass M:\n    def predict_one(self, x: str) -> str:\n        time.sleep(1.5)\n        return x\n"
        "    def example(self): return 'a'\n    def health(self): return False\n"
    )
    with serving(source_of(tmp_path, code, "M")) as server:
        wait_until(lambda: not is_ready(server, "m"))


def test_a_model_that_ignores_signals_ends_with_its_server(tmp_path: Path) -> None:
    code = (
        "import signal, time\nclass M:\n    def load(self, context):\n"
        "        for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, lambda *_: None)\n"
        "    def predict_one(self, x: str) -> str:\n        while True: pass\n"
    )
    source = source_of(tmp_path, code, "M")
    began, others = time.monotonic(), {*engine_processes()}
    with serving(source, drain_timeout=0.5) as server:
        [process] = {*engine_processes()} - others
        threading.Thread(target=lambda: httpx.post(
            f"{server.http_url}/v2/models/m/infer", timeout=5, trust_env=False,
            json={"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["a"]}]},
        )).start()  # fmt: skip
        time.sleep(0.3)
    assert not Path(f"/proc/{process}").exists()
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("signals", [1, 2])
def test_a_server_that_ends_while_it_loads_leaves_no_folders(tmp_path: Path, signals: int) -> None:
    code = (
        "import time\nclass M:\n    def load(self, context): time.sleep(600)\n"
        "    def predict_one(self, x: str) -> str: return x\n"
    )
    (scratch := tmp_path / "scratch").mkdir()
    arguments = ["serve", source_of(tmp_path, code, "M"), *FREE_PORTS]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen([sys.executable, "-m", "ingot", *arguments], env=environment) as process:
        try:
            wait_until(lambda: [*scratch.glob("ingot-engine-*")] != [])
            for _ in range(signals):
                process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            process.kill()
    assert [*scratch.glob("ingot-engine-*")] == []


def wheel(folder: Path, name: str, version: str, shown: str = "") -> None:
    """Write a wheel with one module that has the version, or another text."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"VERSION = {(shown or version)!r}")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.mark.matrix
def test_packages_are_installed_for_a_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sidecar\nclass M:\n    def predict_one(self, x: str) -> str: return sidecar.VERSION\n"
    for version in ("1.0", "2.0"):
        wheel(tmp_path / "wheels", "sidecar", version)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    archives = []
    for version in ("1.0", "2.0"):  # the author has the packages
        installed = tmp_path / f"installed-{version}"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(installed), f"sidecar=={version}"]
        subprocess.run(pip, check=True)
        monkeypatch.syspath_prepend(installed)
        pins = write(tmp_path, "requirements.txt", f"sidecar=={version}\n")
        archive = export_class(source_of(tmp_path, code, "M"), name=f"m{version[0]}", requirements=pins)
        archive.save(out := tmp_path / f"m{version[0]}.ingot")
        sys.path.remove(str(installed))
        archives.append(str(out))
    with (
        pytest.raises(Unsupported, match="or serve it with --install-requirements"),
        serving(*archives, allow_code=True),
    ):
        pass
    with pytest.raises(Unsupported, match="--allow-code"), serving(*archives, install_requirements=True):
        pass
    assert not (tmp_path / "cache").exists()
    for _ in range(2):
        with (
            serving(*archives, allow_code=True, install_requirements=True) as server,
            ingot.Client(server.http_url) as client,
        ):
            for name, expected in (("m1", b"1.0"), ("m2", b"2.0")):
                assert client.infer(name, {"x": np.array([b""], object)})["output"].tolist() == [expected]
    assert len([each for each in (tmp_path / "cache/ingot/packages").iterdir() if each.is_dir()]) == 2
    for file in (tmp_path / "wheels").iterdir():
        file.unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    with (
        pytest.raises(Unsupported, match=r"pip cannot install sidecar==1\.0: ERROR: No matching distribution"),
        serving(archives[0], allow_code=True, install_requirements=True),
    ):
        pass


TALKS = """
import socket, subprocess

class M:
    def load(self, context):
        self.port = int(context.settings["port"]) if context.settings else None
        if self.port is not None:
            self.kept = socket.create_connection(("127.0.0.1", self.port))
            self.kept.sendall(b"hello")

    def predict_one(self, do: str) -> str:
        if do == "kept":
            self.kept.sendall(b"kept")
        if do == "new":
            socket.create_connection(("127.0.0.1", self.port)).sendall(b"new")
        if do == "listen":
            socket.create_server(("127.0.0.1", 0))
        if do == "local":
            socket.socket(socket.AF_UNIX)
        if do == "program":
            return subprocess.run(["echo", "hi"], capture_output=True, text=True, check=True).stdout
        return "done"
"""


@pytest.mark.parametrize(
    ("permit", "allowed"),
    [
        ("network-at-load", {""}),
        ("network", {"", "kept", "new"}),
        ("network,programs", {"", "kept", "new", "program"}),
    ],
)
def test_permissions_allow_what_they_name(tmp_path: Path, permit: str, allowed: set[str]) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with (
        contextlib.closing(listener),
        serving(source_of(tmp_path, TALKS, "M"), permit=permit, model_settings=f"port={port}") as server,
        ingot.Client(server.http_url) as client,
        contextlib.closing(listener.accept()[0]) as accepted,
    ):
        assert accepted.recv(5) == b"hello"
        for what in ("", "kept", "new", "listen", "local", "program"):
            refusal = contextlib.nullcontext() if what in allowed else pytest.raises(InternalError, match="Error")
            with refusal:
                client.infer("m", do(what))


def test_an_archive_needs_the_permissions_that_it_names(tmp_path: Path, run_ingot: RunIngot) -> None:
    source, out = source_of(tmp_path, TALKS, "M"), tmp_path / "m.ingot"
    found = refused(run_ingot("export", source, "--permit", "disk", "-o", out))
    assert "'disk' is not a permission; there are network, network-at-load, programs, write" in found
    assert "exclude each other" in refused(
        run_ingot("export", source, "--permit", "programs,network-at-load", "-o", out)
    )
    succeeded(run_ingot("export", source, "--permit", "programs", "-o", out))
    assert "needs  the permission programs (--permit)" in succeeded(run_ingot("inspect", out))
    for permit in (None, "network"):
        with (
            pytest.raises(Unsupported, match=r"needs the permission programs.*--permit"),
            serving(str(out), allow_code=True, permit=permit),
        ):
            pass
    with (
        serving(str(out), allow_code=True, permit="programs,network") as server,
        ingot.Client(server.http_url) as client,
    ):
        assert client.infer("m", do("program"))["output"].tolist() == [b"hi\n"]
        with pytest.raises(InternalError, match="PermissionError"):  # permitted, but not asked for
            client.infer("m", do("new"))


WRITES = """
class M:
    def load(self, context):
        self.large, self.small = context.files / "large.bin", context.files / "sub" / "small.txt"

    def predict_one(self, do: str) -> str:
        with getattr(self, do).open("r+") as file:
            file.write("changed")
        (self.small.parent / "made.txt").write_text("made")
        return getattr(self, do).read_text()[:8]
"""


@pytest.mark.parametrize("archived", [False, True])
def test_a_model_that_may_write_has_its_own_files(tmp_path: Path, run_ingot: RunIngot, archived: bool) -> None:
    source = source_of(tmp_path / "model", WRITES, "M")
    large = write(tmp_path, "model/large.bin", "x" * (17 << 20))
    write(tmp_path, "model/sub/small.txt", "xxxxxxxx")
    write(tmp_path, "model/.hidden/file", "x")
    out, writing = tmp_path / "m.ingot", tmp_path / "w.ingot"
    included: list[str | Path] = ["--include", large, "--include", large.parent / "sub"]
    succeeded(run_ingot("export", source, *included, "-o", out))
    succeeded(run_ingot("export", source, *included, "--permit", "write", "-o", writing))
    assert "needs  the permission write (--permit)" in succeeded(run_ingot("inspect", writing))
    with (
        pytest.raises(Unsupported, match=r"needs the permission write.*--permit write"),
        serving(str(writing), allow_code=True),
    ):
        pass
    for permit in (None, "write"):
        served = source if not archived else str(writing if permit else out)
        with serving(served, allow_code=True, permit=permit) as server, ingot.Client(server.http_url) as client:
            [model] = server._server.repository
            for file in ("large", "small"):
                refusal = pytest.raises(InternalError, match=r"(Permission|OS)Error.*(temporary|Read-only|Permission)")
                with refusal if not permit and (file == "large" or not archived) else contextlib.nullcontext():
                    assert client.infer(model.name, do(file))["output"].tolist() == [b"changedx"]
    assert large.read_text()[:8] == "xxxxxxxx"
    assert not (tmp_path / "model" / "sub" / "made.txt").exists()


def test_a_large_folder_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a/model.py", "x" * 10)
    write(tmp_path, ".git/large", "x" * 100)
    monkeypatch.setattr(files, "_MOST_COPIED", 10)
    assert [each.name for each in files.copied(tmp_path).rglob("*")] == ["a", "model.py"]
    write(tmp_path, "a/more.py", "x")
    with pytest.raises(InvalidArgument, match="move the class and its files into a folder that has nothing else"):
        files.copied(tmp_path)


def test_settings_and_missing_files(tmp_path: Path) -> None:
    code = (
        "class M:\n    def load(self, context): self.given = dict(context.settings)\n"
        "    def predict_one(self, key: str) -> str: return self.given[key]\n"
    )
    source = source_of(tmp_path, code, "M")
    with serving(source, model_settings="language=en,beams=4") as server, ingot.Client(server.http_url) as client:
        keys = np.array([b"language", b"beams"], object)
        assert client.infer("m", {"key": keys})["output"].tolist() == [b"en", b"4"]
    with pytest.raises(NotFound, match="there is no file"), serving(f"{tmp_path}/none.py:M"):
        pass
    with pytest.raises(Unsupported, match="--engine"), serving(source, engine="openvino"):
        pass
    with pytest.raises(InvalidArgument, match="has no variants"), serving(f"{source}#fp32"):
        pass
