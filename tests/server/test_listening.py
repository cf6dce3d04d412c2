from __future__ import annotations

import errno
import os

import pytest

from ingot.errors import InvalidArgument
from ingot.server.listening import check_port, reserve, taken


@pytest.mark.parametrize("open_port", [check_port, reserve], ids=["at-once", "for-fronts"])
@pytest.mark.parametrize("host", ["nohost.invalid", "192.0.2.1"])
def test_an_address_of_another_machine_is_reported_with_the_remedy(open_port: object, host: str) -> None:
    assert callable(open_port)
    with pytest.raises(
        InvalidArgument, match=rf"{host}:8000 for HTTP: .*(known|assign).*; give --host an address of this"
    ):
        open_port("HTTP", host, 8000)


def test_a_low_port_is_reported_to_need_rights() -> None:
    error = taken("gRPC", "127.0.0.1", 80, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    assert "ports below 1024" in str(error)
    assert "--grpc-port 0" in str(error)
