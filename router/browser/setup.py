"""What a router offers browsers, added to the app of its HTTP port: Connect and gRPC-Web, CORS, the chat page."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from router.browser.later import make_rpc_app
from router.browser.options import BrowserOptions
from router.browser.page import add_chat_page
from router.browser.paths import MOUNT_PATH
from router.grpc_api import InferenceServicer

EXPOSED_HEADERS = (
    "x-request-id",
    "x-octavo-ignored-fields",
    "retry-after",
    "grpc-status",
    "grpc-message",
    "grpc-status-details-bin",
)
"""Headers of responses that a page of another origin may read, beside those it always may."""

PREFLIGHT_MAX_AGE_S = 7200
"""How long a browser may remember what it was allowed; the most that Chromium does."""


def add_browser_doors(
    app: FastAPI, servicer: InferenceServicer, options: BrowserOptions, max_message_bytes: int
) -> None:
    """Add them to the app, whose gate stands already, and innermost: preflights carry no key."""
    app.mount(MOUNT_PATH, make_rpc_app(servicer, max_message_bytes))
    if options.chat_page:
        add_chat_page(app)
    if options.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
            max_age=PREFLIGHT_MAX_AGE_S,
        )
