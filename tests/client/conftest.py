from __future__ import annotations

from tests.server.conftest import folder as folder
from tests.server.conftest import gate as gate
from tests.server.conftest import server as server
