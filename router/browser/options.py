"""The router's options about browsers: whose pages may call it, and whether it shows one of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass

from octavo.options import OptionError, option

ANY_ORIGIN = "*"

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[^\s/?#@\[\],:]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")


@dataclass(frozen=True, kw_only=True)
class BrowserOptions:
    """Part of RouterConfig."""

    cors_origins: str = option(
        "",
        "Origins (comma-separated, as https://chat.example.com) whose web pages may call this router from a browser; "
        "* for every page; none when empty.",
    )
    chat_page: bool = option(True, "Serve a page to chat with the model at /, behind the same key as all else.")

    @property
    def origins(self) -> tuple[str, ...]:
        """The origins that are allowed; ("*",) for every one."""
        return tuple(word.strip() for word in self.cors_origins.split(",") if word.strip())

    def check_browser(self) -> None:
        """Raise OptionError for what no browser calls an origin. Called from `__post_init__` of the whole."""
        for origin in self.origins:
            if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
                raise OptionError(
                    "--cors-origins",
                    origin,
                    "must be scheme://host or scheme://host:port in lower case, without a path",
                    "Write it as the browser's console names it, or * for every page",
                )
        if ANY_ORIGIN in self.origins and len(self.origins) > 1:
            raise OptionError("--cors-origins", self.cors_origins, "* allows every page already", "Give it alone")


def open_to_pages(options: BrowserOptions, *, asks_for_keys: bool) -> list[str]:
    """What pages of strangers could do, a sentence each."""
    if ANY_ORIGIN not in options.origins or asks_for_keys:
        return []
    return [
        "--cors-origins *: any web page may use this router from the browser of whoever reaches it, and read the "
        "answers; set OCTAVO_API_KEY or --key-file, or name the origins"
    ]
