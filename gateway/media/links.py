"""One link of a client's, read in the one way that counts, and the addresses that may stand behind it.

Programs read odd URLs in different ways, and the difference is how a forbidden host is made to look like a permitted
one. So only what all of them read alike is taken: no user names, no blanks, no escapes in hosts, no numbers in other
spellings than four decimals. What an address is for is in IANA's registries of special-purpose addresses.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import idna

from gateway.types import Address, Network

LONGEST = 8192  # characters of a link that is no data: URI
PORTS = {"http": 80, "https": 443}

_WORD = r"[a-z0-9][a-z0-9!#$&^_.+-]*"
_DATA = re.compile(rf'data:(?:{_WORD}/{_WORD})?(?:;[a-z0-9!#$&^_.+="-]+)*,', re.IGNORECASE)
_AUTHORITY = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\[\]@:%]+)(?::[0-9]*)?")
_NAME = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,62})(?:\.[a-z0-9_](?:[a-z0-9_-]{0,62}))*")
_NUMBER = re.compile(r"(?:[0-9]+|0x[0-9a-f]*)")  # a last label of this kind makes parsers take the host for an IPv4
_IN_PATH = "/%:@!$&'()*+,;=~-._"

_NOT_PUBLIC_V4 = [
    ipaddress.ip_network(block)
    for block in (
        "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24"
        " 192.31.196.0/24 192.52.193.0/24 192.88.99.0/24 192.168.0.0/16 192.175.48.0/24 198.18.0.0/15 198.51.100.0/24"
        " 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4"
        " 168.63.129.16/32"  # Azure's services for its machines, on an address that looks public
    ).split()
]
_PUBLIC_V6 = ipaddress.ip_network("2000::/3")  # all that is handed out as global unicast
_NOT_PUBLIC_V6 = [
    ipaddress.ip_network(block)
    for block in (
        "2001::/23 2001:db8::/32 2620:4f:8000::/48 3fff::/20"  # 2001::/32 is Teredo
    ).split()
]
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_SIX_TO_FOUR = ipaddress.ip_network("2002::/16")
_ISATAP = (0x00005EFE, 0x02005EFE)  # upper half of an interface id whose lower half is an IPv4 address


class Target(NamedTuple):
    """Where an http(s) link leads."""

    scheme: str
    host: str  # canonical
    port: int
    path: str  # with its query, in ASCII

    @property
    def authority(self) -> str:
        """As in the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


def is_data(link: str) -> bool:
    """Whether it carries its content. The part in front of the comma has to be of the usual form: some programs take
    anything else that begins with `data:` for the name of a file."""
    return link[:5].lower() == "data:" and _DATA.match(link, 0, 256) is not None


def read_link(link: str) -> Target | None:
    """None for whatever is not an http(s) URL that everybody reads alike."""
    if not 0 < len(link) <= LONGEST or "\\" in link or not link.isprintable() or any(map(str.isspace, link)):
        return None
    try:
        parts = urlsplit(link)
        port = parts.port
        written = parts.hostname or ""
    except ValueError:  # an unclosed bracket, a port that is no number
        return None
    if parts.scheme not in PORTS or port == 0 or not _AUTHORITY.fullmatch(parts.netloc):
        return None
    host = canonical_host(written)
    if host is None or (("[" in parts.netloc) != (":" in host)):
        return None
    path = quote(parts.path or "/", safe=_IN_PATH)
    query = f"?{quote(parts.query, safe=_IN_PATH + '?')}" if parts.query else ""
    return Target(parts.scheme, host, port or PORTS[parts.scheme], path + query)


def canonical_host(host: str) -> str | None:
    """The one spelling of a name or address: lower case, ASCII, no dot at the end. None for what is neither."""
    if ":" in host:
        return _canonical_v6(host)
    if not host.isascii():
        try:
            host = idna.encode(host, uts46=True, std3_rules=True).decode()
        except UnicodeError:  # idna's own error is one
            return None
    host = host.lower().removesuffix(".")
    if len(host) > 253 or not _NAME.fullmatch(host):
        return None
    if not _NUMBER.fullmatch(host.rpartition(".")[2]):
        return host
    try:
        return str(ipaddress.IPv4Address(host))  # four decimals without leading zeros
    except ValueError:
        return None


def _canonical_v6(host: str) -> str | None:
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return None
    return None if address.scope_id else str(address)


def literal(host: str) -> Address | None:
    """The address that a canonical host is, unless it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def may_connect(address: Address, networks: Collection[Network], *, named: bool = False) -> bool:
    """Whether a connection to `address` is permitted.

    `networks` are open beside the public Internet. `named`: the operator has written down this very address. Nobody
    does that to a link-local one in earnest: metadata services are there.
    """
    if address.is_multicast or address.is_unspecified:
        return False
    if any(address.version == network.version and address in network for network in networks):
        return True
    carried = _carried(address)
    if carried is not None:
        return may_connect(carried, networks, named=named)
    if is_public(address):
        return True
    return named and not address.is_link_local and (address.is_loopback or not address.is_reserved)


def _carried(address: Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 address is only another way to. Teredo and IPv4-compatible ones are never public,
    so what they carry does not matter."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _SIX_TO_FOUR:
        return ipaddress.IPv4Address(int(address) >> 80 & 0xFFFFFFFF)
    return address.ipv4_mapped


def is_public(address: Address) -> bool:
    """Global unicast, and no other address in disguise."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in block for block in _NOT_PUBLIC_V4)
    if address not in _PUBLIC_V6 or any(address in block for block in (*_NOT_PUBLIC_V6, _SIX_TO_FOUR)):
        return False
    inside = int(address) & 0xFFFFFFFF
    return int(address) >> 32 & 0xFFFFFFFF not in _ISATAP or is_public(ipaddress.IPv4Address(inside))
