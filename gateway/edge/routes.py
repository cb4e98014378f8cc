"""The routes that carry inference, which the edge takes before FastAPI sees them."""

from __future__ import annotations

import httptools

from backends.base import Operation

HOT_ROUTES = {
    b"/v1/chat/completions": Operation.CHAT,
    b"/v1/completions": Operation.COMPLETIONS,
    b"/v1/embeddings": Operation.EMBEDDINGS,
    b"/v1/rerank": Operation.RERANK,
    b"/v1/tokenize": Operation.TOKENIZE,
    b"/v1/detokenize": Operation.DETOKENIZE,
    b"/v1/audio/transcriptions": Operation.TRANSCRIPTIONS,
    b"/v1/audio/translations": Operation.TRANSLATIONS,
    b"/v1/audio/speech": Operation.SPEECH,
}


def path_of(url: bytes) -> bytes:
    """The path of a target with a query or in absolute form; b"" when there is none."""
    if b"?" not in url and url.startswith(b"/"):
        return url
    try:
        return httptools.parse_url(url).path or b""
    except httptools.HttpParserError:
        return b""
