"""Certificate authorities that exist for one test, and the certificates they sign, as files."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)
PLAIN = serialization.NoEncryption()


class Identity(NamedTuple):
    """A certificate and its key, as files."""

    cert_file: Path
    key_file: Path


class Authority:
    """A certificate authority."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key, self._count = ec.generate_private_key(ec.SECP256R1()), 0
        self.identity = self._issue(self._name, self._key, x509.BasicConstraints(ca=True, path_length=None), DAY)

    @property
    def ca_file(self) -> Path:
        return self.identity.cert_file

    def issue(
        self, common_name: str | None = None, *sans: x509.GeneralName, valid: datetime.timedelta = DAY
    ) -> Identity:
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)] if common_name is not None else []
        extensions = [
            x509.BasicConstraints(ca=False, path_length=None),
            *([x509.SubjectAlternativeName(sans)] * bool(sans)),
        ]
        key = ec.generate_private_key(ec.SECP256R1())
        return self._issue(x509.Name(attributes), key, *extensions, valid)

    def _issue(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *rest: Any) -> Identity:
        *extensions, valid = rest
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * DAY)
            .not_valid_after(now + valid)
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        certificate = builder.sign(self._key, hashes.SHA256())
        self._count += 1
        name = f"{self._name.rfc4514_string()}-{self._count}"
        found = Identity(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        found.cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        traditional = serialization.PrivateFormat.TraditionalOpenSSL
        found.key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, traditional, PLAIN))
        return found
