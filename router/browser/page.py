"""The chat page at /: files of `router/web`, as they are, under a policy that lets them run nothing else.

Knows file names and headers; what the page does is in the files, and it asks only the public service of this router.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def add_chat_page(app: FastAPI) -> None:
    """Serve the page at / and its parts below /web/."""
    for entry in (files("router") / "web").iterdir():
        _, dot, extension = entry.name.rpartition(".")
        path = "/" if entry.name == "index.html" else f"/web/{entry.name}"
        _add_file(app, path, entry.read_bytes(), _TYPES[dot + extension])


def _add_file(app: FastAPI, path: str, content: bytes, content_type: str) -> None:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "content-type": content_type, "etag": tag}

    async def serve(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        return Response(status_code=304, headers=headers) if tag in known else Response(content, headers=headers)

    app.add_route(path, serve, methods=["GET"], include_in_schema=False)
