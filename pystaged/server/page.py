"""The web page at /: one file that loads nothing from other servers."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import HTMLResponse


def page() -> HTMLResponse:
    """The page, with a policy that allows only its own script and this server."""
    text = files("pystaged.server").joinpath("page.html").read_text("utf-8")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash_of(text, 'script')}",
            f"style-src {_hash_of(text, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)


def _hash_of(text: str, tag: str) -> str:
    """The policy's source expression for the page's only element of this kind."""
    found = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    content = found[1] if found else ""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
