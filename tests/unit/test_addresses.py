"""Where a caller is: nothing that a stranger writes moves him."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gateway.addresses import client_address, is_inside
from gateway.types import Address, Network

PROXIES = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))
ANYWHERE = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6))
TRUSTED = st.one_of(st.ip_addresses(network="10.0.0.0/8"), st.ip_addresses(network="fd00::/8"))
# What can stand in a header, and above all what looks like addresses.
WRITTEN = st.one_of(
    st.binary(max_size=60),
    st.lists(st.one_of(ANYWHERE, TRUSTED).map(str), max_size=6).map(lambda found: ", ".join(found).encode()),
    st.text("0123456789abcdef.:,%[] ", max_size=60).map(str.encode),
)


def plain(address: Address) -> Address:
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


@given(ANYWHERE, WRITTEN)
@settings(max_examples=300, deadline=None)
def test_no_header_moves_a_caller_whose_peer_is_no_trusted_proxy(peer: Address, header: bytes) -> None:
    assume(not is_inside(plain(peer), PROXIES))
    assert client_address(str(peer), header, PROXIES) == plain(peer)
    assert client_address(str(peer), header, ()) == plain(peer)


@given(TRUSTED, ANYWHERE, WRITTEN, st.lists(TRUSTED, max_size=4))
@settings(max_examples=300, deadline=None)
def test_behind_trusted_proxies_the_caller_is_whom_the_first_of_them_saw(
    peer: Address, caller: Address, header: bytes, chain: list[Address]
) -> None:
    """Whatever the caller has written into the header himself: proxies append."""
    assume(not is_inside(plain(caller), PROXIES))
    appended = ", ".join(map(str, [caller, *chain])).encode()
    for forwarded in (appended, header + b"," + appended):
        assert client_address(str(peer), forwarded, PROXIES) == plain(caller)


@pytest.mark.parametrize(
    ("forwarded", "address"),
    [
        ("", "10.0.0.1"),
        (" , ,", "10.0.0.1"),
        ("192.0.2.1", "192.0.2.1"),
        ("192.0.2.9,192.0.2.1", "192.0.2.1"),
        ("192.0.2.1, 10.0.0.7, 10.0.0.8", "192.0.2.1"),
        ("10.0.0.7", "10.0.0.7"),  # somebody on the proxies' own network
        ("2001:db8::1", "2001:db8::1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("192.0.2.1:51234", "192.0.2.1"),
        ("[2001:db8::1]:51234, 10.0.0.7:80", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("192.0.2.1, []", None),
        ("192.0.2.1, [", None),
        ("192.0.2.1, :", None),
        ("192.0.2.1, unknown", None),
        ("unknown, 192.0.2.1", "192.0.2.1"),
        ("192.0.2.1, unknown, 10.0.0.8", None),
        ("\u00b9.2.3.4", None),
    ],
)
def test_the_header_is_read_from_its_end(forwarded: str, address: str | None) -> None:
    expected = ip_address(address) if address else None
    assert client_address("10.0.0.1", forwarded.encode("latin-1"), PROXIES) == expected


@pytest.mark.parametrize("peer", [None, "", "/run/gateway.sock", "testclient"])
def test_a_peer_without_an_address_has_none_and_is_trusted_by_nobody(peer: str | None) -> None:
    networks: tuple[Network, ...] = (ip_network("0.0.0.0/0"), ip_network("::/0"))
    assert client_address(peer, b"192.0.2.1", networks) is None
    assert not is_inside(None, networks)


def test_a_mapped_address_is_the_one_it_maps() -> None:
    assert client_address("::ffff:192.0.2.1", b"", ()) == IPv4Address("192.0.2.1")
    assert client_address("::ffff:10.0.0.1", b"192.0.2.1", PROXIES) == IPv4Address("192.0.2.1")


def test_a_header_full_of_trusted_addresses_is_given_up_on() -> None:
    """The work is bounded, and what was not looked at is not taken for an address."""
    short, long = b",".join([b"10.0.0.9"] * 32), b"192.0.2.1," + b",".join([b"10.0.0.9"] * 8_000)
    assert client_address("10.0.0.1", b"192.0.2.1," + short, PROXIES) == IPv4Address("192.0.2.1")
    assert client_address("10.0.0.1", long, PROXIES) is None
    for rest in (b"192.0.2.1:80", b"[192.0.2.1]"):
        assert client_address("10.0.0.1", b",".join([rest, b"x", short]), PROXIES) is None


def test_networks_of_one_version_hold_no_addresses_of_the_other() -> None:
    assert not is_inside(IPv6Address("::1"), (ip_network("0.0.0.0/0"),))
    assert not is_inside(IPv4Address("127.0.0.1"), (ip_network("::/0"),))
    assert not is_inside(IPv4Address("127.0.0.1"), ())
    assert is_inside(IPv4Address("127.0.0.1"), (ip_network("::1/128"), ip_network("127.0.0.0/8")))
