"""The page that shows a server to people: files that read what monitoring reads."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Response
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


def add_page(app: FastAPI) -> None:
    """Add the page at ``/ui``, to which ``/`` leads."""
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in _MEDIA}

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse(PAGE, 307, _HEADERS)

    @app.get(PAGE, include_in_schema=False)
    async def page() -> Response:
        return _file("index.html", files["index.html"])

    def add(name: str, content: bytes) -> None:
        @app.get(f"{PAGE}/{name}", include_in_schema=False)
        async def part() -> Response:
            return _file(name, content)

    for name, content in files.items():
        add(name, content)


def _file(name: str, content: bytes) -> Response:
    return Response(content, headers=_HEADERS, media_type=_MEDIA[Path(name).suffix])
