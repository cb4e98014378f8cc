"""Open connections of clients: how many there are, and how many of them come from one place."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address

from gateway.addresses import is_inside
from gateway.types import Network

_NETWORK_BITS = 64  # of an IPv6 address: a subscriber has all of such a network


class Crowd:
    """Counts connections from the moment they are accepted until they are gone; each change takes constant time."""

    def __init__(self) -> None:
        self.total = 0
        self._by_place: dict[str, int] = {}

    def enter(self, peer: str | None, most: int, most_of_one: int, trusted: tuple[Network, ...]) -> str | None:
        """Counts a connection in. Returns what `leave` wants to be told, or None when there are too many.

        Args: peer: its address; None for a Unix socket, which counts only in the total. most: connections of all.
              most_of_one: of one place, `trusted` networks excepted, behind which there are many callers.
        """
        if self.total >= most:
            return None
        place = place_of(peer, trusted)
        if place:
            count = self._by_place.get(place, 0)
            if count >= most_of_one:
                return None
            self._by_place[place] = count + 1
        self.total += 1
        return place

    def leave(self, place: str) -> None:
        """Takes out what `enter` has counted."""
        self.total -= 1
        if place:
            count = self._by_place[place] - 1
            if count:
                self._by_place[place] = count
            else:
                del self._by_place[place]

    @property
    def places(self) -> int:
        """How many places have a connection."""
        return len(self._by_place)


def place_of(peer: str | None, trusted: tuple[Network, ...] = ()) -> str:
    """Whose connections count together: an IPv4 address, or an IPv6 network of 64 bits; "" for whom nothing counts."""
    if not peer:
        return ""
    if ":" not in peer and not trusted:
        return peer
    try:
        address = ip_address(peer.partition("%")[0])
    except ValueError:
        return peer
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if is_inside(address, trusted):
        return ""
    if not isinstance(address, IPv6Address):
        return str(address)
    shift = 128 - _NETWORK_BITS
    return str(IPv6Address(int(address) >> shift << shift))
