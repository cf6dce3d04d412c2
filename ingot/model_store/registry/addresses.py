"""Where a registry may lead its clients: to itself, to public addresses, and to hosts that a setting lists.

Otherwise a registry could make a client inside a private network send requests there. A name is resolved once: the
client connects to the addresses that were checked, since a second look-up could return another one.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import urllib.request
from typing import Final

import httpx

from ingot.addresses import is_loopback
from ingot.errors import InvalidArgument
from ingot.model_store.references import RegistryAddress

REDIRECT_HOSTS: Final = "INGOT_REDIRECT_HOSTS"
"""Environment variable with hosts of private addresses, separated by commas, that registries may redirect to."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def listed(variable: str) -> frozenset[str]:
    """Return the hosts in an environment variable that separates them by commas, in lower case."""
    return frozenset(item.strip().lower() for item in os.environ.get(variable, "").split(",") if item.strip())


def checked(registry: RegistryAddress, url: httpx.URL, setting: str = REDIRECT_HOSTS) -> tuple[str, ...]:
    """Return the addresses to connect to for a URL that a registry leads to; none if any will do.

    Any will do for the registry itself and for listed hosts. Behind a proxy, which resolves names, only addresses in
    the URL are checked.

    Args:
        registry: its host is not checked: the user named it.
        url: where it leads to.
        setting: the environment variable with listed hosts.

    Raises:
        InvalidArgument: the host has a private address and is not listed.
        httpx.ConnectError: the name does not resolve.
    """
    own = httpx.URL(registry.url).host
    if url.host == own or (is_loopback(url.host) and is_loopback(own)) or url.host in listed(setting):
        return ()
    if proxied(url):
        private = "a private address" if is_loopback(url.host) or not _may_be_public(url.host) else ""
        addresses: tuple[str, ...] = ()
    else:
        addresses = _resolve(url)
        private = next((address for address in addresses if not is_public(address)), "")
    if private:
        where = url.host if private in (url.host, "a private address") else f"{url.host} ({private})"
        raise InvalidArgument(
            f"{registry} leads to {where}, a private address, which is not followed. If the registry keeps its data "
            f"there, allow it with {setting}={url.host} (several with commas between)"
        )
    return addresses


def proxied(url: httpx.URL) -> bool:
    """Return whether the environment names a proxy for a URL."""
    proxies = urllib.request.getproxies()
    return (url.scheme in proxies or "all" in proxies) and not urllib.request.proxy_bypass(url.host)


def is_public(text: str) -> bool:
    """Return whether an IP address is reachable from everywhere: not private, loopback, link-local or reserved.

    Of IPv6 addresses that stand for an IPv4 address, that one counts.
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        address = _embedded(address) or address
    return address.is_global and not address.is_multicast


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if address in _NAT64 or (int(address) >> 32 == 0 and int(address) > 1):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)


def _may_be_public(host: str) -> bool:
    try:
        return is_public(host)
    except ValueError:  # a name
        return True


def _resolve(url: httpx.URL) -> tuple[str, ...]:
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        found = socket.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise httpx.ConnectError(f"{url.host}: {error}") from error
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
