"""Addresses of mail boxes and of machines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import AddressValueError, IPv6Address
from typing import Final

from gateway.masking.folding import fold
from gateway.masking.spans import Span

_LOCAL: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.!#$%&'*+/=?^_`{|}~-")
_LONGEST_LOCAL = 64  # RFC 5321, 4.5.3.1.1
_DOMAIN: Final = re.compile(
    r"(?:[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?\.){1,8}(?:[A-Za-z]{2,24}|xn--[0-9A-Za-z]{2,59})"
)
_IMAGE_SIZE: Final = re.compile(r"[0-9]x\.")  # icon@2x.png

_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
_IPV4: Final = re.compile(rf"(?<![0-9A-Za-z_.])(?:{_OCTET}\.){{3}}{_OCTET}(?![0-9A-Za-z_]|\.[0-9])")
_NO_ADDRESS: Final = re.compile(
    fold(r"(?:version|ver\.?|release|build|driver|firmware|section|chapter|バージョン|リリース|[§第]|==|[A-Za-z]/)")
    + "[ :=]{0,2}$",
    re.IGNORECASE,
)
_NEAR = 16  # characters
_IPV6: Final = re.compile(
    r"(?<![0-9A-Za-z_.])(?<![0-9A-Fa-f:]:)[0-9A-Fa-f:]{3,39}(?:(?<=:)[0-9]{1,3}(?:\.[0-9]{1,3}){3})?(?![0-9A-Za-z_:])"
)


def mail_addresses(text: str) -> Iterator[Span]:
    place = text.find("@")
    while place >= 0:
        domain = _DOMAIN.match(text, place + 1)
        if domain is not None and not _IMAGE_SIZE.match(text, place + 1):
            start = _start_of_local(text, place)
            ssh = text[start:place] == "git" and text[domain.end() : domain.end() + 1] == ":"
            if start < place and not ssh:
                yield Span(start, domain.end(), "EMAIL")
        place = text.find("@", place + 1)


def _start_of_local(text: str, at: int) -> int:
    start = at
    while start > 0 and at - start < _LONGEST_LOCAL and text[start - 1] in _LOCAL:
        start -= 1
    while start < at and text[start] in ".'=?&/`|{}*":  # of the text around it
        start += 1
    # What stands before the last of these is a parameter's name or a path.
    return max(start, *(text.rfind(mark, start, at) + 1 for mark in "=/&|"))


def ip_addresses(text: str) -> Iterator[Span]:
    """But for addresses that are nobody's: loopback, unspecified, netmasks."""
    for match in _IPV4.finditer(text):
        start, first = match.start(), match[0].partition(".")[0]
        if first not in ("0", "127", "255") and not _NO_ADDRESS.search(text, max(0, start - _NEAR), start):
            yield Span(match.start(), match.end(), "IP")
    for match in _IPV6.finditer(text):
        if _is_ipv6(match[0]):
            yield Span(match.start(), match.end(), "IP")


def _is_ipv6(found: str) -> bool:
    """Whether it is an address, and not a name in a program: `a::b` could be both."""
    if found.count(":") < 2:
        return False
    try:
        address = IPv6Address(found)
    except AddressValueError:
        return False
    groups = [group for group in found.split(":") if group]
    if address.is_loopback or address.is_unspecified or not any(char.isdigit() for char in found):
        return False
    return len(groups) > 2 or len(groups[0]) > 2
