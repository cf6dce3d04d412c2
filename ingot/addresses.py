"""Addresses of servers: what a socket or a name says about who can reach them."""

from __future__ import annotations

import ipaddress


def is_path(address: str) -> bool:
    """Return whether an address is the path of a Unix socket."""
    return "://" not in address and ("/" in address or address.endswith(".sock"))


def is_loopback(host: str) -> bool:
    """Return whether a host means this machine: ``localhost``, 127.0.0.0/8 or ::1, with or without brackets."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
