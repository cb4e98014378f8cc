"""Links inside a request that would make somebody's server fetch an address: images, sounds, videos, files.

Without a rule, a caller could let the engine read from inside the network. Data URIs carry their content and pass;
hosts the operator has named pass; everything else is refused before any connection is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from gateway.errors import BadRequest


def check_media(body: Mapping[str, Any], allowed_hosts: frozenset[str]) -> None:
    """Looks at the content parts of chat messages.

    Raises: BadRequest naming the part.
    """
    messages = body.get("messages")
    if not isinstance(messages, list):
        return
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            for place, part in enumerate(content):
                if isinstance(part, dict):  # a type is not needed: engines take a bare {"image_url": ...} too
                    _check_part(part, f"messages[{number}].content[{place}]", allowed_hosts)


def _check_part(part: Mapping[str, Any], where: str, allowed_hosts: frozenset[str]) -> None:
    """`{"type": "image_url", "image_url": {"url": ...}}` and the like: whatever the type, every *_url is a link."""
    for name, value in part.items():
        if name.endswith("url"):
            link = value.get("url") if isinstance(value, dict) else value
            if link is not None and not _is_allowed(link, allowed_hosts):
                raise BadRequest(
                    f"'{where}.{name}' has to be a data: URI; this gateway fetches nothing from other hosts.",
                    param=f"{where}.{name}",
                    code="unsupported_value",
                )


def _is_allowed(link: object, allowed_hosts: frozenset[str]) -> bool:
    if not isinstance(link, str):
        return False
    if link[:5].lower() == "data:":
        return True
    try:
        parts = urlsplit(link)
        host = parts.hostname
    except ValueError:
        return False
    # A user name in front of the host, a backslash or a space are how one host is made to look like another.
    return (
        parts.scheme in ("http", "https")
        and host in allowed_hosts
        and parts.username is None
        and not any(character in link for character in "\\ \t\r\n")
    )
