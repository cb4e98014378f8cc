"""TLS: contexts for the gateway's port and towards engines, made from files and made anew when the files change.

Protocols: RFC 8446 (1.3), RFC 5246 (1.2), RFC 7301 (ALPN). The suites are those of 1.2 that Mozilla's "intermediate"
profile names with an ephemeral elliptic curve.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TypeAlias

from cryptography import x509

from gateway.config import Config, TlsConfig
from gateway.types import Endpoint

SUITES = "@SECLEVEL=2:ECDHE+AESGCM:ECDHE+CHACHA20"  # of 1.2; those of 1.3 are all of this kind
PRIORITIZE_CHACHA = 0x200000  # OpenSSL's bit, which the ssl module does not name: for clients without AES in hardware
EXPIRES_SOON = timedelta(days=14)

Stamp: TypeAlias = tuple[tuple[int, int, int] | None, ...]

log = logging.getLogger("sekisho.tls")


class TlsFileError(ValueError):
    """A file that cannot be used. `field`: the setting that names it."""

    def __init__(self, field: str, problem: str, hint: str) -> None:
        super().__init__(f"{field}: {problem}; {hint}")
        self.field, self.problem, self.hint = field, problem, hint


class _Encrypted(Exception):
    """OpenSSL has asked for the password of a key."""


# --- the gateway's port
def server_context(given: TlsConfig) -> ssl.SSLContext:
    """Every connection is a full handshake with an ephemeral key: there are no session tickets, whose key would open
    what was recorded earlier, and no client certificate is taken on the word of an earlier handshake.

    Raises: TlsFileError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3 if given.min_version == "1.3" else ssl.TLSVersion.TLSv1_2
    context.set_ciphers(SUITES)
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE | PRIORITIZE_CHACHA
    context.num_tickets = 0
    _load_chain(context, given.cert_file, given.key_file, "cert_file", "key_file")
    if given.client_ca_file is not None:
        _load_authorities(context, given.client_ca_file, "client_ca_file")
        context.verify_mode = ssl.CERT_OPTIONAL if given.client_certificates == "optional" else ssl.CERT_REQUIRED
    return context


def port_problem(given: TlsConfig | None) -> tuple[str, str, str] | None:
    """(path, what is wrong, what to write instead)."""
    try:
        if given is not None:
            server_context(given)
    except TlsFileError as error:
        return f"server.tls.{error.field}", error.problem, error.hint
    return None


class ServerTls:
    """The context for new connections of one process. Connections that exist keep the one they began with."""

    def __init__(self, given: TlsConfig) -> None:
        """Raises: TlsFileError."""
        self._given, self._stamp = given, stamp(_server_files(given))
        self.context = server_context(given)
        self.expires = warn_of_expiry(given.cert_file)

    def refresh(self, given: TlsConfig | None = None) -> bool:
        """Whether settings or files are other ones now. `given`: None for the settings there were.

        Raises: TlsFileError; the old context stays.
        """
        given = given or self._given
        seen = stamp(_server_files(given))  # before reading: what changes while it is read is found the next time
        if given == self._given and seen == self._stamp:
            return False
        self.context = server_context(given)
        self._given, self._stamp = given, seen
        self.expires = warn_of_expiry(given.cert_file)
        return True


def warn_of_expiry(cert_file: Path) -> datetime:
    """When the certificate ends."""
    leaf = x509.load_pem_x509_certificates(cert_file.read_bytes())[0]
    end, now = leaf.not_valid_after_utc, datetime.now(UTC)
    if end < now:
        log.warning("the certificate of the gateway's port has expired on %s: clients refuse it", end.date())
    elif end - now < EXPIRES_SOON:
        log.warning("the certificate of the gateway's port expires on %s", end.date())
    return end


# --- towards engines
def engine_context(endpoint: Endpoint) -> ssl.SSLContext:
    """Verifies the engine against its own CA file or the system's, and shows a client certificate if there is one.

    Raises: TlsFileError.
    """
    if endpoint.ca_file:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_authorities(context, Path(endpoint.ca_file), "ca_file")
    else:
        context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if endpoint.client_cert_file and endpoint.client_key_file:
        chain, key = Path(endpoint.client_cert_file), Path(endpoint.client_key_file)
        _load_chain(context, chain, key, "client_cert_file", "client_key_file")
    return context


class EngineTls:
    """Contexts by the files they are made of. A changed file counts for the connections that are opened after it."""

    def __init__(self) -> None:
        self._contexts: dict[tuple[str | None, ...], tuple[Stamp, ssl.SSLContext]] = {}

    def context(self, endpoint: Endpoint) -> ssl.SSLContext:
        """Raises: TlsFileError for files that could never be used; of changed ones that cannot, the old ones stay."""
        names = endpoint.ca_file, endpoint.client_cert_file, endpoint.client_key_file
        seen = stamp(Path(name) for name in names if name)
        known = self._contexts.get(names)
        if known is not None and known[0] == seen:
            return known[1]
        try:
            context = engine_context(endpoint)
        except TlsFileError as error:
            if known is None:
                raise
            log.error("a changed file for TLS to engines cannot be used, the old one stays: %s", error)
            context = known[1]
        self._contexts[names] = seen, context
        return context


_ENGINES_CERTIFICATE = {
    9: "The engine's TLS certificate is not valid yet.",
    10: "The engine's TLS certificate has expired.",
    62: "The engine's TLS certificate is for another host name.",
    64: "The engine's TLS certificate is for another address.",
} | dict.fromkeys((18, 19, 20, 21), "The engine's TLS certificate is not from an authority that the gateway trusts.")
_UNFINISHED = (ssl.SSLWantReadError, ssl.SSLWantWriteError)  # what a time limit has cut short
_NO_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "UNEXPECTED_EOF_WHILE_READING"}
_TOO_OLD = {"UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION", "NO_PROTOCOLS_AVAILABLE"}
_NOT_LIKED = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED", "TLSV1_ALERT_UNKNOWN_CA", "SSLV3_ALERT_BAD_CERTIFICATE",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED", "SSLV3_ALERT_CERTIFICATE_REVOKED", "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE", "TLSV1_ALERT_ACCESS_DENIED", "TLSV1_ALERT_DECRYPT_ERROR",
}  # fmt: skip


def blame(error: BaseException | None) -> str | None:
    """Whose fault it is that a connection to an engine failed, in words that name no host; None if not that of TLS.

    Codes: X509_V_ERR_* of OpenSSL's x509_vfy.h; reasons: those of its sslerr.h, as the ssl module spells them.
    """
    while error is not None and (not isinstance(error, ssl.SSLError) or isinstance(error, _UNFINISHED)):
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    if isinstance(error, ssl.SSLCertVerificationError):
        return _ENGINES_CERTIFICATE.get(error.verify_code, "The engine's TLS certificate is not valid.")
    if error.reason in _NO_TLS:
        return "The engine's port does not speak TLS."
    if error.reason in _TOO_OLD:
        return "The engine speaks no TLS that is new enough: the gateway needs 1.2."
    if error.reason in _NOT_LIKED:
        return "The engine did not accept the gateway's client certificate, or wants one and gets none."
    if error.reason == "SSLV3_ALERT_HANDSHAKE_FAILURE":
        return "The engine refused the TLS handshake: it may want a client certificate, or shares no cipher suite."
    return "The TLS handshake with the engine failed."


# --- files
def tls_files(config: Config) -> list[Path]:
    """All that TLS is made of: of the port and of every engine."""
    replicas = [replica for model in config.models for replica in model.replicas]
    named = [
        path
        for engine in (*replicas, *config.discovery)
        for path in (engine.ca_file, engine.client_cert_file, engine.client_key_file)
    ]
    of_port = _server_files(config.server.tls) if config.server.tls is not None else []
    return of_port + [path for path in named if path is not None]


def _server_files(given: TlsConfig) -> list[Path]:
    return [path for path in (given.cert_file, given.key_file, given.client_ca_file) if path is not None]


def stamp(paths: Iterable[Path]) -> Stamp:
    """Changes when one of the files does. Links are followed: some platforms renew certificates by moving a link."""
    return tuple(_stamp(path) for path in paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class Watch:
    """Tells when files have changed and come to rest. A certificate and its key are rarely replaced in one moment, and
    what lies between would look broken."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._begin(paths)

    def _begin(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._acted = self._last = stamp(paths)

    def changed(self, paths: Sequence[Path]) -> bool:
        """Once for each change: at the second look that finds the same. Other paths are a new beginning."""
        if paths != self._paths:
            self._begin(paths)
            return False
        before, self._last = self._last, stamp(paths)
        if self._last == self._acted or self._last != before:
            return False
        self._acted = self._last
        return True


def _load_chain(context: ssl.SSLContext, chain: Path, key: Path, chain_field: str, key_field: str) -> None:
    _read_certificates(chain, chain_field)
    try:
        context.load_cert_chain(chain, key, password=partial(_no_password, key))
    except _Encrypted:
        hint = "write a copy without its password: openssl pkey -in KEY -out COPY"
        raise TlsFileError(key_field, f"{key} is encrypted", hint) from None
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED"):  # of the same kind, of another
            problem = f"{key} is not the key of {chain}"
            raise TlsFileError(key_field, problem, "name the key that the certificate was made for") from None
        if error.reason in ("EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"):
            problem = f"{chain} is too weak ({error.reason})"
            raise TlsFileError(chain_field, problem, "use RSA of 2048 bits or more, or an elliptic curve") from None
        raise TlsFileError(key_field, f"{key} holds no usable private key", "name a key in PEM") from None
    except OSError as error:
        raise _unreadable(key_field, key, error) from None


def _no_password(key: Path) -> str:
    raise _Encrypted(key)  # without a callback OpenSSL would ask on the terminal and wait


def _load_authorities(context: ssl.SSLContext, path: Path, field: str) -> None:
    _read_certificates(path, field)
    try:
        context.load_verify_locations(path)
    except (OSError, ssl.SSLError):
        raise TlsFileError(field, f"{path} holds no usable certificate", "name certificates in PEM") from None


def _read_certificates(path: Path, field: str) -> None:
    """Raises: TlsFileError. OpenSSL would not say which of two files is wrong."""
    try:
        x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise _unreadable(field, path, error) from None
    except ValueError:
        raise TlsFileError(field, f"{path} holds no usable certificate", "name certificates in PEM") from None


def _unreadable(field: str, path: Path, error: OSError) -> TlsFileError:
    return TlsFileError(field, f"{path} cannot be read ({error.strerror})", "let the gateway's user read it")
