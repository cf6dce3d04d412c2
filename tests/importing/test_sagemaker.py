"""SageMaker's model.tar.gz, imported and served: answers are those of its functions, called here by hand."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import ingot
from ingot.errors import InvalidArgument
from tests.importing.sources import tgz
from tests.importing.test_default_handlers import serving

OWN = """
import json

import torch
from helpers import double


def model_fn(model_dir, context):
    model = torch.nn.Linear(3, 2)
    model.load_state_dict(torch.load(model_dir + "/net.pth"))
    return model.eval()


def input_fn(request_body, content_type):
    assert isinstance(request_body, str) and content_type == "application/json"
    return torch.tensor(json.loads(request_body)["rows"])


def predict_fn(data, model):
    with torch.no_grad():
        return double(model(data))


def output_fn(prediction, accept):
    return json.dumps({"rows": prediction.tolist(), "accept": accept})
"""
ROWS = [[1.0, 2.0, 3.0], [0.5, 0.0, -1.0]]


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2).eval()


def answers(rows: Any) -> list[list[float]]:
    with torch.no_grad():
        found: list[list[float]] = net()(torch.tensor(rows)).tolist()
    return found


def script() -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(net()), stream := io.BytesIO())
    return stream.getvalue()


def weights() -> bytes:
    torch.save(net().state_dict(), stream := io.BytesIO())
    return stream.getvalue()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("sagemaker")
    helpers = b"def double(x):\n    return 2 * x\n"
    own = {"net.pth": weights(), "code/inference.py": OWN.encode(), "code/helpers.py": helpers}
    plain = {"model.pt": script(), "code/inference.py": b"", "code/requirements.txt": b""}
    for name, content in (("own", own), ("plain", plain)):
        path = tgz(folder / f"{name}.tar.gz", content)
        ingot.import_model(path, allow_code=True).save(folder / f"{name}.ingot")
    with serving(folder / "own.ingot", folder / "plain.ingot") as client:
        yield client


@pytest.mark.matrix
def test_its_own_functions(served: httpx.Client) -> None:
    answer = served.post("/predictions/own", json={"rows": ROWS})
    doubled = [[2 * value for value in row] for row in answers(ROWS)]
    assert answer.text == json.dumps({"rows": doubled, "accept": "application/json"})
    assert answer.headers["content-type"] == "application/json"
    assert served.post("/invocations?model_name=own", json={"rows": ROWS}).text == answer.text


@pytest.mark.matrix
def test_the_functions_of_the_containers(served: httpx.Client) -> None:
    array = np.array(ROWS, np.float32)
    np.save(stream := io.BytesIO(), array)
    csv = "\n".join(",".join(map(str, row)) for row in ROWS)
    for content, media_type in ((json.dumps(ROWS), "json"), (csv, "csv"), (stream.getvalue(), "x-npy")):
        kind = f"text/{media_type}" if media_type == "csv" else f"application/{media_type}"
        answer = served.post("/predictions/plain", content=content, headers={"content-type": kind})
        assert answer.json() == answers(ROWS)
    headers = {"content-type": "application/json", "accept": "application/x-npy"}
    answer = served.post("/predictions/plain", content=json.dumps(ROWS), headers=headers)
    assert answer.headers["content-type"] == "application/x-npy"
    np.testing.assert_array_equal(np.load(io.BytesIO(answer.content)), np.array(answers(ROWS), np.float32))
    answer = served.post("/predictions/plain", content=json.dumps(ROWS), headers={**headers, "accept": "text/csv"})
    assert answer.text == "".join(",".join(str(np.float32(each)) for each in row) + "\n" for row in answers(ROWS))


@pytest.mark.matrix
@pytest.mark.parametrize("header", ["content-type", "accept"])
def test_other_types_are_refused_as_the_containers_do(served: httpx.Client, header: str) -> None:
    headers = {"content-type": "application/json", header: "application/x-other"}
    answer = served.post("/predictions/plain", content=json.dumps(ROWS), headers=headers)
    assert answer.status_code == 415
    assert answer.json()["message"] == "Content type application/x-other is not supported by this framework."


def test_what_an_archive_needs_is_named(tmp_path: Path) -> None:
    content = {"code/inference.py": b"import no_such_package", "code/requirements.txt": b"numpy>=1"}
    path = tgz(tmp_path / "model.tar.gz", content)
    with pytest.raises(InvalidArgument) as caught:
        ingot.import_model(path)
    message = str(caught.value)
    for part in ("has SageMaker's code/inference.py", "--allow-code", "'numpy>=1'", "pip install no_such_package"):
        assert part in message, message
