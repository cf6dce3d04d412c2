"""The page that shows a server to people: files that read what monitoring reads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse

from ingot.server.http.parser import PAGE

FOLDER = Path(__file__).parents[1] / "page"

_MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_HEADERS = {
    # Nothing from elsewhere, and nothing inline: a name of a model cannot become a script.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


_FILES = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in _MEDIA}


async def _root(request: Request) -> Response:
    return RedirectResponse(PAGE, 307, _HEADERS)


async def _page(request: Request, file: str = "index.html") -> Response:
    if file not in _FILES:
        raise HTTPException(404)
    return Response(_FILES[file], headers=_HEADERS, media_type=_MEDIA[Path(file).suffix])


ENDPOINTS: Mapping[str, Callable[..., Awaitable[Response]]] = {"root": _root, "page": _page}
"""What serves the operations of the page."""
