"""Counting connections: nothing is lost or kept, whatever comes and goes."""

from __future__ import annotations

from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.edge.crowd import Crowd, place_of

PROXIES = (ip_network("10.0.0.0/8"), ip_network("2001:db8:ff::/48"))


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("2001:db8::1", "2001:db8::ffff:ffff:ffff:ffff", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
    ],
)
def test_whose_connections_count_together(one: str, other: str, together: bool) -> None:
    for trusted in ((), PROXIES):
        assert (place_of(one, trusted) == place_of(other, trusted)) is together


@pytest.mark.parametrize("peer", [None, "", "10.1.2.3", "::ffff:10.1.2.3", "2001:db8:ff::1"])
def test_proxies_and_sockets_without_an_address_count_only_in_the_total(peer: str | None) -> None:
    crowd = Crowd()
    for _ in range(5):
        assert crowd.enter(peer, 5, 1, PROXIES) == ""
    assert crowd.enter(peer, 5, 1, PROXIES) is None and crowd.total == 5 and crowd.places == 0


def test_one_address_leaves_room_for_others() -> None:
    crowd = Crowd()
    places = [crowd.enter("192.0.2.1", 10, 3, ()) for _ in range(5)]
    assert places == ["192.0.2.1"] * 3 + [None] * 2
    assert crowd.enter("192.0.2.2", 10, 3, ()) is not None
    crowd.leave("192.0.2.1")
    assert crowd.enter("192.0.2.1", 10, 3, ()) is not None


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["a", "b", "2001:db8::1", "10.0.0.1", None]))))
def test_what_is_counted_is_what_is_open(moves: list[tuple[bool, str | None]]) -> None:
    crowd, inside = Crowd(), []
    for comes, peer in moves:
        if comes:
            place = crowd.enter(peer, 6, 2, PROXIES)
            assert (place is None) == (len(inside) >= 6 or (place_of(peer, PROXIES) != "" and
                                                            inside.count(place_of(peer, PROXIES)) >= 2))  # fmt: skip
            inside += [] if place is None else [place]
        elif inside:
            crowd.leave(inside.pop(0))
        assert crowd.total == len(inside) and crowd.places == len({place for place in inside if place})
