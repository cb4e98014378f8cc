"""Where a caller is: the peer's address, or what proxies that are trusted say of it."""

from __future__ import annotations

import re
from ipaddress import IPv6Address, ip_address

from gateway.types import Address, Network

_MOST_HOPS = 32  # proxies in a row
_WITH_PORT = re.compile(r"\[([^\],]*)\](?::\d{1,5})?|([^:,]+):\d{1,5}")


def client_address(peer: str | None, forwarded: bytes, trusted: tuple[Network, ...]) -> Address | None:
    """The caller's address, None where it is not an IP address.

    Args: peer: of the connection. forwarded: every `X-Forwarded-For` of the request, joined by commas in their order.
          trusted: networks of proxies; what anybody else puts into the header is not believed.

    The header is read from its end: each proxy appends the peer that it saw, so the last entry which is not a trusted
    proxy's own address is the caller's, and what stands before it is hearsay.
    """
    address = _address(peer or "")
    if not is_inside(address, trusted):
        return address
    # Bounded: a header of 64 KiB made of trusted addresses is an attack, and what is left unsplit is no address.
    for hop in reversed(forwarded.decode("latin-1").rsplit(",", _MOST_HOPS)):
        if hop.strip():
            address = _address(_without_port(hop.strip()))
            if not is_inside(address, trusted):
                break
    return address


def is_inside(address: Address | None, networks: tuple[Network, ...]) -> bool:
    return address is not None and any(address in network for network in networks)


def _without_port(hop: str) -> str:
    """Some proxies write the caller's port too: `192.0.2.1:51234`, `[2001:db8::1]:51234`."""
    found = _WITH_PORT.fullmatch(hop)
    return (found[1] or found[2] or "") if found else hop


def _address(text: str) -> Address | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address
