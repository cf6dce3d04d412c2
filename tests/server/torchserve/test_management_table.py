"""The table of pytorch/serve's own tests of management, row by row, on a server with the models that it names.

Source: test/postman/management_data.json of https://github.com/pytorch/serve 0.12: method, path, and the status that
TorchServe answers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import ingot
from ingot import Store
from tests.server.torchserve.conftest import client, net
from tests.server.torchserve.test_management import QUIET

ROWS = """
POST models?url=squeezenet1_1.mar&model_name=squeezenet1_1 200
POST models?url=mnist.mar&model_name=mnist 200
POST models?url=densenet161.mar&model_name=densenet161 200
POST models?url=https://torchserve.pytorch.org/mar_files/densenet161.mar&model_name=densenet161 500
DELETE models/densenet161 200
POST models 400
DELETE models/mnist 200
POST models?url=mnist.mar&model_name=mnist&handler=invalidHandler 200
DELETE models/mnist 200
POST models?url=mnist.mar&model_name=mnist&handler=invalidHandler 200
PUT models/mnist?min_worker=1&synchronous=true 500
DELETE models/mnist 200
GET models/squeezenet1_1/all 200
GET models/squeezenet1_1/1.0 200
GET models/squeezenet1_1 200
DELETE models/squeezenet1_1 200
POST models?url=squeezenet1_1.mar&model_name=squeezenet1_1&runtime=python4 400
GET models?limit=&next_page_token= 200
POST models?url=squeezenet1_1.mar&model_name=squeezenet1_1 200
PUT models/squeezenet1_1?min_worker=1 202
PUT models/squeezenet1_1?min_worker=1&synchronous=true 200
PUT models/squeezenet1_1/1.0?min_worker=1&synchronous=true 200
PUT models/squeezenet1_1/0.0?min_worker=1&synchronous=true 404
PUT models/squeezenet1_1?min_worker=1&number_gpu=1 202
PUT models/squeezenet1_1/1.0/set-default 200
PUT models/squeezenet1_1/0.0/set-default 404
PUT models/squeezenet0_1/1.0/set-default 404
DELETE models/squeezenet1_1 200
POST models?url=squeezenet1_1.mar&model_name=squeezenet1_1&handler=serve/ts/torch_handler/image_classifier.py:handle 200
DELETE models/squeezenet1_1 200
POST models?url=squeezenet1_1.mar&model_name=squeezenet1_1&batch_size=3&initial_workers=3&startup_timeout=0 500
POST models?url=squeezenet1_1.mar&model_name=squeezenet1_1&startup_timeout=0 200
DELETE models/squeezenet1_1 200
POST models?url=resnet-152-batch.mar&model_name=resnet152&batch_size=2 200
DELETE models/resnet152 200
POST models?url=resnet-152-batch.mar&model_name=resnet152&batch_size=dd&initial_workers=1 200
DELETE models/resnet152 200
POST models?url=resnet-152-batch.mar&model_name=resnet152&batch_size=2&initial_workers=1&max_batch_delay=junk 200
DELETE models/resnet152 200
POST models?url=squeezenet1_1.mar&model_name=squeezenet1_1&initial_workers=-1 200
DELETE models/squeezenet1_1 200
POST models?url=resnet-18.mar&model_name=resnet-18&synchronous=true 200
DELETE models/resnet-18 200
POST models?url=resnet-18.mar&model_name=resnet-18&synchronous=-1 200
DELETE models/resnet-18 200
POST models?url=resnet-18.mar&model_name=resnet-18&synchronous=false 200
GET models?limit=1 200
GET models?limit=-1 200
GET models?limit=1&next_page_token=1 200
GET models?limit=1&next_page_token=-1 200
PUT models/resnet-18?number_gpu=10 202
PUT models/resnet-18?number_gpu=-1 202
PUT models/resnet-18?min_worker=1&max_worker=1&synchronous=true 200
PUT models/resnet-18?min_worker=1&max_worker=1&synchronous=false 202
PUT models/resnet-18?timeout=-1 202
PUT models/resnet-18?timeout=0 202
POST models?url=&model_name=resnet-18 404
POST models?url=https://torchserve.pytorch.org/mar_files/invalid-resnet-18.mar&model_name=invalid-resnet18 400
GET models/invalid_squeezenet1_1 404
GET models/squeezenet1_1/0.0 404
GET models?next_page_token=12 200
PUT models/resnet-18?min_worker=1&synchronous=Nan 202
PUT models/resnet-18?min_worker=nan&synchronous=nan 202
PUT models/resnet-18 202
PUT models/resnet181?min_worker=1 404
PUT models/resnet-18?min_worker=2&max_worker=1 400
PUT models/resnet-18?min_worker=1 202
PUT models/resnet-18?min_worker=0 202
PUT models/resnet-18?min_worker=-1 500
PUT models/resnet-18?max_worker=-1 400
PUT models/invalid_squeezenet1_1/1.0/set-default 404
DELETE models/resnet-18 200
DELETE models/squeezenet1_1/0.0 404
POST models?url=squeezenet1_1.mar&model_name=squeezenet1_1 200
DELETE models/squeezenet1_1/?synchronous=true 200
POST models?url=squeezenet1_1.mar&model_name=squeezenet1_1 200
DELETE models/squeezenet1_1/?synchronous=nan 200
POST models?url=squeezenet1_1.mar&model_name=squeezenet1_1 200
DELETE models/squeezenet1_1/?timeout=true 200
POST models?url=squeezenet1_1.mar&model_name=squeezenet1_1 200
DELETE models/squeezenet1_1/?timeout=true&synchronous=-1 200
DELETE models/invalid_squeezenet1_1 404
"""
# The statuses of rows that differ here, by their numbers; the guide has the reasons.
HERE = {
    3: (500, 400),  # a URL is refused; of a name of the store, this is 409
    **dict.fromkeys((7, 9, 28), (200, 400)),  # the parameter handler is refused
    **dict.fromkeys((8, 11, 29), (200, 404)),  # so that there is nothing to unregister
    10: (500, 404),  # or to scale
    30: (500, 200),  # startup_timeout has no effect
    31: (200, 409),  # so that the model is registered already
    68: (500, 400),  # a negative min_worker is a fault of the request
}
MODELS = ("squeezenet1_1", "mnist", "densenet161", "resnet-152-batch", "resnet-18")


@pytest.mark.matrix
def test_statuses_are_those_of_torchserves_own_tests(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    for name in MODELS:
        store.push(net(tmp_path), f"{name}:1.0")
    different = {}
    with (
        ingot.serve("other=squeezenet1_1:1.0", store=store, insecure=True, **QUIET) as server,  # type: ignore[arg-type]
        client(server, "management") as manage,
    ):
        for index, row in enumerate(ROWS.split("\n")[1:-1]):
            method, path, wanted = row.split(" ")
            if (found := manage.request(method, f"/{path}").status_code) != int(wanted):
                different[index] = (int(wanted), found)
    assert different == HERE
