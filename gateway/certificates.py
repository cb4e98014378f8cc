"""Client certificates as identities: which names one carries, and who is called so."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gateway.config.access import CertificateConfig
from gateway.people import TenantPolicy, member
from gateway.types import Principal

# What names of each kind look like. The configuration writes them without their kind, so a name of one kind must not
# pass for one of another: a CA that checks who owns a URI may let anybody have a DNS name, and that may hold any text.
_SAN_FORMS = {
    "DNS": re.compile(r"[^:/@\s]+"),
    "email": re.compile(r"[^:/\s]+@[^:/@\s]+"),
    "URI": re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:\S+"),
    "IP Address": re.compile(r"[0-9A-F.:]+"),
}


def names(peer_certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a verified certificate as `ssl.SSLSocket.getpeercert` describes it: `san:...`, then `subject:...`.

    Whether the certificate is genuine was decided in the handshake; here it only gets read.
    """
    return tuple(_names(peer_certificate))


def _names(certificate: Mapping[str, Any]) -> Iterator[str]:
    for kind, value in certificate.get("subjectAltName", ()):
        form = _SAN_FORMS.get(kind)
        if form is not None and form.fullmatch(value):
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
