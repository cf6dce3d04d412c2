"""Paginated lists of a registry: each page names the next one in its ``Link`` header."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import replace

import httpx

from ingot.errors import InvalidArgument
from ingot.model_store.references import Reference, is_version, version_key
from ingot.model_store.registry.auth import Scope
from ingot.model_store.registry.client import Client, RegistryResponse, Request

MAX_PAGES = 200
MAX_ITEMS = 10_000
_NEXT = re.compile(r'<([^<>]*)>\s*;[^,<>]*\brel="?next"?', re.IGNORECASE)


def pages(client: Client, request: Request, allow: Collection[int] = ()) -> Iterator[RegistryResponse]:
    """Yield the response to a request and to those for the following pages.

    Raises:
        InvalidArgument: a page has another path than the first one, or there are too many.
    """
    first = httpx.URL(request.url)
    for _ in range(MAX_PAGES):
        answer = client.call(request, allow)
        yield answer
        link = _NEXT.search(answer.headers.get("Link", "")[:4096])
        if link is None or answer.status != 200:
            return
        url = httpx.URL(client.target(request.url, link[1]))
        if (url.host, url.port, url.path) != (first.host, first.port, first.path):
            raise InvalidArgument(f"{client.address} links to a next page elsewhere: '{link[1][:200]}'")
        request = replace(request, url=str(url))
    raise InvalidArgument(f"{client.address} returned a list of more than {MAX_PAGES} pages")


def names(client: Client) -> list[str] | None:
    """Return the registry's repositories that are valid model names; None if it does not list them.

    Raises:
        InvalidArgument: it lists too many, or its response is not a list.
        PermissionDenied: it refuses access.
    """
    request = Request("GET", client.url("_catalog?n=1000"), Scope())
    found = _items(client, request, "repositories", allow=(404, 405, 501))
    return None if found is None else [name for name in found if _is_reference(name)]


def tags(client: Client, name: str) -> list[str]:
    """Return a repository's tags, versions first, without those of attachments.

    Raises:
        InvalidArgument: the registry lists too many, or its response is not a list.
        PermissionDenied: it refuses access.
    """
    request = Request("GET", client.url(f"{name}/tags/list?n=1000"), Scope(name))
    found = _items(client, request, "tags", allow=(404,)) or ()
    shown = [tag for tag in found if _is_reference(f"{name}:{tag}")]
    return sorted(shown, key=lambda tag: (not is_version(tag), version_key(tag) if is_version(tag) else (), tag))


def _is_reference(text: str) -> bool:
    try:
        return str(Reference.parse(text)) == text
    except InvalidArgument:
        return False


def _items(client: Client, request: Request, key: str, allow: Collection[int]) -> list[str] | None:
    """Return the texts listed under ``key``; None if the status of the response is in ``allow``."""
    found: dict[str, None] = {}
    for answer in pages(client, request, allow):
        if answer.status in allow:
            return None
        try:
            content = json.loads(answer.content)[key]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise InvalidArgument(f"{client.address} returned something other than a list of {key}") from error
        if content is not None and not isinstance(content, list):
            raise InvalidArgument(f"{client.address} returned something other than a list of {key}")
        found.update((item, None) for item in content or () if isinstance(item, str))
        if len(found) > MAX_ITEMS:
            raise InvalidArgument(f"{client.address} lists more than {MAX_ITEMS} {key}")
    return list(found)
