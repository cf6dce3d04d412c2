"""An MLflow model of the flavor ``python_function`` as a handler: bodies and answers are those of its scoring server.

Source: mlflow/pyfunc/__init__.py, mlflow/pyfunc/scoring_server/__init__.py and mlflow/sklearn/__init__.py of
https://github.com/mlflow/mlflow 3.17.
"""

from __future__ import annotations

import importlib
import io
import json
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ingot import foreign
from ingot.runtime.engines.python.torchserve.ts.context import Context
from ingot.runtime.engines.python.torchserve.ts.util import PredictionException

MODEL = "MLmodel"
FLAVOR, SKLEARN = "python_function", "sklearn"
_JSON, _CSV = "application/json", "text/csv"
_FORMS = ("dataframe_split", "dataframe_records", "instances", "inputs")
_TYPES = {"boolean": "bool", "integer": "int32", "long": "int64", "float": "float32", "double": "float64"}
_BAD, _UNSUPPORTED = 400, 415


def is_pickled(flavors: Mapping[str, Any]) -> bool:
    """Whether a model is a pickle of scikit-learn, which needs no MLflow."""
    formats = ("pickle", "cloudpickle")
    own = flavors.get(SKLEARN) or {}
    loaded = (flavors.get(FLAVOR) or {}).get("loader_module") == "mlflow.sklearn"
    return loaded and own.get("serialization_format", "pickle") in formats


class MLflow:
    """Calls a model with what a body has: a DataFrame, an array, or arrays by name. Bodies reach it as bytes."""

    raw = True

    def initialize(self, context: Context) -> None:
        """Load the model."""
        folder, model = Path(context.system_properties["model_dir"]), context.model_yaml_config
        flavors = model["flavors"]
        flavor = flavors[FLAVOR]
        self._schema = json.loads((model.get("signature") or {}).get("inputs") or "[]")
        if flavor.get("code"):
            sys.path.insert(0, str(folder / flavor["code"]))
        if any("tensor-spec" not in each for each in self._schema):
            importlib.import_module("pandas")  # fails here instead of at each request
        self._predict = self._loaded(folder, flavors)

    def handle(self, data: Sequence[dict[str, Any]], context: Context) -> list[Any]:
        """Answer a batch, one request after the other."""
        return [self._answer(index, row, context) for index, row in enumerate(data)]

    def _loaded(self, folder: Path, flavors: Mapping[str, Any]) -> Callable[..., Any]:
        flavor, name = flavors[FLAVOR], "predict"
        if is_pickled(flavors):
            name = flavor.get("predict_fn") or name
            file = folder / (flavors[SKLEARN].get("pickled_model") or flavor["model_path"])
            model = pickle.loads(file.read_bytes())
        else:
            loader = importlib.import_module(flavor["loader_module"])
            model = loader._load_pyfunc(str(folder / (flavor.get("data") or "")))
        predict: Callable[..., Any] = getattr(model, name)
        return predict

    def _answer(self, index: int, row: dict[str, Any], context: Context) -> str:
        media_type = (context.get_request_header(index, "content-type") or _JSON).partition(";")[0].strip().lower()
        body = bytes(row.get("body", b""))
        if media_type not in (_JSON, _CSV):
            raise PredictionException(f"content type {media_type} is not {_JSON} or {_CSV}", _UNSUPPORTED)
        try:
            data, params = (_csv(body), None) if media_type == _CSV else self._parsed(json.loads(body))
            data = self._typed(data)
        except Exception as error:  # NumPy and pandas raise errors of many types
            raise PredictionException(f"the body does not fit the model: {foreign.typed(error)}", _BAD) from error
        context.set_response_content_type(index, _JSON)
        found = self._predict(data, params=params) if params else self._predict(data)
        return json.dumps({"predictions": _plain(found)})

    def _parsed(self, body: Any) -> tuple[Any, Any]:
        forms = [name for name in _FORMS if isinstance(body, dict) and name in body]
        if len(forms) != 1:
            raise ValueError(f"it must be an object with one of {', '.join(_FORMS)}")
        [form] = forms
        value = body[form]
        if form == "dataframe_split":
            value = _frame(value["data"], columns=value.get("columns"), index=value.get("index"))
        elif form == "dataframe_records":
            value = _frame(value)
        elif form == "instances" and value and isinstance(value[0], dict):
            value = {name: np.array([each[name] for each in value]) for name in value[0]}
        return value, body.get("params")

    def _typed(self, data: Any) -> Any:
        """Return data with the columns and types of the signature."""
        if not self._schema:
            return np.array(data) if isinstance(data, list) else data
        if "tensor-spec" not in self._schema[0]:
            return self._columns(data)
        types = {each.get("name", ""): each["tensor-spec"]["dtype"] for each in self._schema}
        if isinstance(data, dict):
            return {name: np.asarray(data[name], kind) for name, kind in types.items()}
        return np.asarray(data, next(iter(types.values())))

    def _columns(self, data: Any) -> Any:
        names = [each.get("name", number) for number, each in enumerate(self._schema)]
        frame = _frame(data, columns=names) if isinstance(data, list) else _frame(data)
        needed = [name for name, each in zip(names, self._schema, strict=True) if each.get("required", True)]
        if missing := [name for name in needed if name not in frame.columns]:
            raise ValueError(f"it lacks the columns {missing}")
        chosen = frame[[name for name in names if name in frame.columns]]
        types = {name: _TYPES.get(each["type"]) for name, each in zip(names, self._schema, strict=True)}
        return chosen.astype({name: types[name] for name in chosen.columns if types[name] is not None})


def _frame(data: Any, **options: Any) -> Any:
    return importlib.import_module("pandas").DataFrame(data, **options)


def _csv(body: bytes) -> Any:
    return importlib.import_module("pandas").read_csv(io.BytesIO(body))


def _plain(found: Any) -> Any:
    """Return predictions as JSON has them: rows of a DataFrame are objects."""
    if hasattr(found, "to_frame"):
        found = found.to_frame()
    if hasattr(found, "to_dict"):
        return json.loads(found.to_json(orient="records"))
    return found.tolist() if isinstance(found, np.ndarray) else found
