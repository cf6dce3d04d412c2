"""MLflow's folders, imported and served: answers are those of the model, called here by hand."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from sklearn.linear_model import LogisticRegression

import ingot
from ingot.errors import InvalidArgument
from tests.importing.test_default_handlers import serving

X = np.array([[0.0, 1.0], [1.0, 0.0], [2.0, 1.0], [3.0, 0.0]])
COLUMNS = [{"type": "double", "name": "a", "required": True}, {"type": "double", "name": "b", "required": True}]
TENSOR = [{"type": "tensor", "tensor-spec": {"dtype": "float64", "shape": [-1, 2]}}]
CODE = """
class Doubled:
    def predict(self, data, params=None):
        return {name: (params or {}).get("by", 2) * array for name, array in data.items()}["x"]


def _load_pyfunc(path):
    assert path.endswith("data")
    return Doubled()
"""


def fitted() -> LogisticRegression:
    return LogisticRegression().fit(X, [0, 0, 1, 1])


def folder(path: Path, files: dict[str, bytes], inputs: Any, **flavors: Any) -> Path:
    """Write a folder as MLflow 3.17 does."""
    signature = {"inputs": json.dumps(inputs), "outputs": None, "params": None}
    model = {"flavors": flavors, "mlflow_version": "3.17.2", "signature": signature}
    for name, content in {**files, "MLmodel": yaml.safe_dump(model).encode()}.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def sklearn(path: Path, inputs: Any, requirements: bytes = b"mlflow==3.17.2\n") -> Path:
    function = {"loader_module": "mlflow.sklearn", "model_path": "model.pkl", "predict_fn": "predict"}
    own = {"pickled_model": "model.pkl", "serialization_format": "cloudpickle"}
    files = {"model.pkl": pickle.dumps(fitted()), "requirements.txt": requirements}
    return folder(path, files, inputs, python_function=function, sklearn=own)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    root = tmp_path_factory.mktemp("mlflow")
    named = [{**TENSOR[0], "name": "x"}]
    function = {"loader_module": "own_loader", "code": "code", "data": "data"}
    found = [
        sklearn(root / "tensor", TENSOR),
        folder(root / "own", {"code/own_loader.py": CODE.encode(), "data/x": b""}, named, python_function=function),
    ]
    for path in found:
        ingot.import_model(path, allow_code=True).save(root / f"{path.name}.ingot")
    with serving(root / "tensor.ingot", root / "own.ingot") as client:
        yield client


@pytest.mark.matrix
def test_a_pickle_of_scikit_learn_needs_no_mlflow(served: httpx.Client) -> None:
    expected = {"predictions": fitted().predict(X).tolist()}
    for form in ("inputs", "instances"):
        answer = served.post("/invocations?model_name=tensor", json={form: X.tolist()})
        assert answer.json() == expected
        assert answer.headers["content-type"] == "application/json"


@pytest.mark.matrix
def test_a_loader_of_its_own(served: httpx.Client) -> None:
    body = {"inputs": {"x": X.tolist()}, "params": {"by": 3}}
    assert served.post("/predictions/own", json=body).json() == {"predictions": (3 * X).tolist()}
    rows = {"instances": [{"x": row} for row in X.tolist()]}
    assert served.post("/predictions/own", json=rows).json() == {"predictions": (2 * X).tolist()}


@pytest.mark.matrix
def test_bodies_that_do_not_fit(served: httpx.Client) -> None:
    bodies: list[Any] = [[[1, 2]], {"inputs": [["a"]]}, {"inputs": [], "instances": []}]
    for body in bodies:
        answer = served.post("/predictions/tensor", json=body)
        assert answer.status_code == 400
        assert "the body does not fit the model" in answer.json()["message"]
    answer = served.post("/predictions/tensor", content=b"", headers={"content-type": "image/png"})
    assert answer.status_code == 415


@pytest.mark.matrix
def test_columns_are_a_data_frame(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    ingot.import_model(sklearn(tmp_path / "table", COLUMNS), allow_code=True).save(tmp_path / "table.ingot")
    frame = pandas.DataFrame(X, columns=["a", "b"])
    expected = {"predictions": fitted().predict(X).tolist()}
    with serving(tmp_path / "table.ingot") as client:
        split = {"dataframe_split": {"columns": ["b", "a"], "data": X[:, ::-1].tolist()}}
        for body in (split, {"dataframe_records": frame.to_dict(orient="records")}, {"inputs": X.tolist()}):
            assert client.post("/invocations", json=body).json() == expected
        text = frame.to_csv(index=False)
        assert client.post("/invocations", content=text, headers={"content-type": "text/csv"}).json() == expected
        answer = client.post("/invocations", json={"dataframe_records": [{"a": 1}]})
        assert answer.status_code == 400
        assert "lacks the columns ['b']" in answer.json()["message"]


def test_what_a_folder_needs_is_named(tmp_path: Path) -> None:
    path = sklearn(tmp_path / "model", TENSOR, b"mlflow==3.17.2\nnumpy>=1")
    with pytest.raises(InvalidArgument) as caught:
        ingot.import_model(path)
    for part in ("has MLflow's MLmodel, whose model is a pickle or code", "--allow-code", "'numpy>=1'"):
        assert part in str(caught.value)
    path = folder(tmp_path / "onnx", {}, TENSOR, onnx={})
    with pytest.raises(InvalidArgument, match="no flavor python_function"):
        ingot.import_model(path, allow_code=True)
