from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.outside import Service, serving
from tests.support import matrix

OPTIONS = {"one process": (), "engine processes": ("--isolate", "all")}


@pytest.fixture(scope="module", params=matrix(*OPTIONS))
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving("fast", tmp_path_factory.mktemp("attacked"), *OPTIONS[request.param]) as running:
        yield running
