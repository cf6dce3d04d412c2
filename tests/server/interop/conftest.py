from __future__ import annotations

from tests.server.outside import service as service
from tests.server.outside import still_answers as still_answers
