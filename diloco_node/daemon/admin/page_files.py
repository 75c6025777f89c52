"""The page: its files in `page/`, how they are served, and the same page as one file."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from diloco_node.daemon.admin.live_events import json_text

FOLDER: Final = Path(__file__).parent / "page"
INDEX: Final = "index.html"
MODULES: Final = ("dom.js", "text.js", "store.js", "health.js", "charts.js", "rounds.js", "tables.js", "main.js")
"""The page's own scripts; each imports only from those before it."""

LIBRARY: Final = "uplot.js"
STYLES: Final = ("uplot.css", "page.css")
ICON: Final = "icon.svg"

_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Another version may be served here tomorrow.
    "Cache-Control": "no-cache",
}


def page_routes() -> list[web.RouteDef]:
    """`/` and the files it loads from `/page/`; nothing else of the folder is served."""
    names = {"/": INDEX} | {f"/page/{name}": name for name in (*MODULES, LIBRARY, *STYLES, ICON)}
    return [web.get(path, _serve(name)) for path, name in names.items()]


def _serve(name: str) -> Any:
    path = FOLDER / name

    async def serve(request: web.Request) -> web.Response:
        # Tens of kilobytes that the kernel has in memory.
        body = path.read_bytes()
        return web.Response(body=body, content_type=_TYPES[path.suffix], charset="utf-8", headers=HEADERS)

    return serve


def page_with(snapshot: Mapping[str, Any]) -> str:
    """The page as one HTML file with a snapshot in it: it loads nothing, and shows what was."""
    data = json_text(snapshot).replace("<", "\\u003c")
    scripts = [(FOLDER / LIBRARY).read_text(), "\n".join(_plain_script(name) for name in MODULES)]
    styles = "\n".join((FOLDER / name).read_text() for name in STYLES)
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'sha256-{_digest(styles)}'"
    head = [
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f"<style>{styles}</style>",
        f'<script type="application/json" id="snapshot">{data}</script>',
        f"<script>{scripts[0]}</script>",
        f'<script type="module">{scripts[1]}</script>',
    ]
    text = (FOLDER / INDEX).read_text()
    page = re.sub(r"[ \t]*<(?:link|script)\b[^>]*>(?:</script>)?\n", "", text)
    return page.replace("</head>", "\n".join([*head, "</head>"]))


def _plain_script(name: str) -> str:
    """A module without its imports and exports: in one file all share one scope."""
    text = re.sub(r"^import [^;]*;\n", "", (FOLDER / name).read_text(), flags=re.MULTILINE)
    return re.sub(r"^export (?=(?:const|let|function|class) )", "", text, flags=re.MULTILINE)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
