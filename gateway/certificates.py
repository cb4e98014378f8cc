"""Client certificates as identities: which names one carries, and who is called so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gateway.config_schema import CertificateConfig
from gateway.people import TenantPolicy, member
from gateway.types import Principal

_SAN_KINDS = {"DNS", "URI", "email", "IP Address"}


def names(peer_certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a verified certificate as `ssl.SSLSocket.getpeercert` describes it: `san:...`, then `subject:...`.

    Whether the certificate is genuine was decided in the handshake; here it only gets read.
    """
    return tuple(_names(peer_certificate))


def _names(certificate: Mapping[str, Any]) -> Iterator[str]:
    for kind, value in certificate.get("subjectAltName", ()):
        if kind in _SAN_KINDS:
            yield f"san:{value}"
    for relative_name in certificate.get("subject", ()):
        for attribute, value in relative_name:
            if attribute == "commonName":
                yield f"subject:{value}"


def holders(entries: Iterable[CertificateConfig], tenants: Mapping[str, TenantPolicy]) -> dict[str, Principal]:
    """Callers by the name their certificate carries. Entries whose tenant does not exist (yet) are nobody."""
    found = {}
    for entry in entries:
        name = f"san:{entry.san}" if entry.san is not None else f"subject:{entry.subject}"
        policy = tenants.get(entry.tenant)
        if policy is not None:
            found[name] = member(policy, f"cert:{name.partition(':')[2]}", entry.role, entry.models, None, b"")
    return found
