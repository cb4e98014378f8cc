"""Which names a certificate carries, and whose they are."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.certificates import holders, names
from gateway.config import CertificateConfig
from gateway.people import People
from gateway.records import Changes, TenantRecord

TENANTS = People().with_changes(Changes(1, [TenantRecord("t1", ("small",)), TenantRecord("t2")], [])).tenants


def subject(*attributes: tuple[str, str]) -> tuple[tuple[tuple[str, str], ...], ...]:
    return tuple((attribute,) for attribute in attributes)


def test_alternative_names_come_before_the_subject() -> None:
    certificate = {
        "subject": subject(("organizationName", "Example"), ("commonName", "app"), ("commonName", "second")),
        "subjectAltName": (("DNS", "app.example"), ("URI", "spiffe://cluster/app"), ("email", "app@example.com"),
                           ("IP Address", "10.0.0.1"), ("IP Address", "2001:DB8:0:0:0:0:0:1")),
        "issuer": subject(("commonName", "authority")), "serialNumber": "07",
    }  # fmt: skip
    assert names(certificate) == (
        "san:app.example", "san:spiffe://cluster/app", "san:app@example.com", "san:10.0.0.1",
        "san:2001:DB8:0:0:0:0:0:1", "subject:app", "subject:second",
    )  # fmt: skip


@pytest.mark.parametrize(
    "certificate", [{}, {"subject": ()}, {"subjectAltName": ()}, {"issuer": subject(("commonName", "authority"))}]
)  # fmt: skip
def test_a_certificate_without_names_has_none(certificate: dict[str, Any]) -> None:
    assert names(certificate) == ()


@pytest.mark.parametrize(
    ("kind", "value"),
    [("DNS", "spiffe://cluster/app"), ("DNS", "app@example.com"), ("DNS", ""), ("DNS", "a b"), ("DNS", "a/b"),
     ("email", "spiffe://user@cluster/app"), ("email", "app.example"), ("email", ""), ("URI", "app.example"),
     ("URI", "app@example.com"), ("URI", ""), ("IP Address", "app.example"), ("DirName", (("commonName", "app"),)),
     ("Registered ID", "1.2.3.4"), ("othername", "<unsupported>")],
)  # fmt: skip
def test_a_name_of_one_kind_does_not_pass_for_another(kind: str, value: object) -> None:
    assert names({"subjectAltName": ((kind, value),)}) == ()


def test_a_subject_is_no_alternative_name_and_the_other_way_round() -> None:
    found = holders(
        [
            CertificateConfig(san="app", tenant="t1"),
            CertificateConfig(subject="job", tenant="t2", role="operator", models=("m-*",)),
        ],
        TENANTS,
    )
    assert set(found) == {"san:app", "subject:job"}
    assert not set(names({"subject": subject(("commonName", "app"))})) & found.keys()
    assert not set(names({"subjectAltName": (("DNS", "job"),)})) & found.keys()


def test_a_holder_is_a_caller_of_its_tenant() -> None:
    found = holders([CertificateConfig(san="app", tenant="t1", role="operator", models=("m-*",))], TENANTS)["san:app"]
    assert (found.tenant.name, found.key, found.role) == ("t1", "cert:app", "operator")
    assert (found.models, found.key_models, found.expires) == (("small",), ("m-*",), None)
    assert found.limits is TENANTS["t1"].limits


def test_entries_of_tenants_that_do_not_exist_are_nobody() -> None:
    assert holders([CertificateConfig(san="app", tenant="t3")], TENANTS) == {}
