"""One signed token (JWT): what it says, whether one of its issuer's keys signed it, and whom it stands for.

Signatures and keys are python-jose's. The decisions around them are made here, since its own checks let some malformed
claims pass. No clock, no network: key sets and the time are arguments.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import orjson
from jose import jwk
from jose.exceptions import JWKError
from pydantic import TypeAdapter, ValidationError

from gateway.config.access import JwtConfig
from gateway.config.values import Glob, tenant_name
from gateway.errors import AuthError
from gateway.people import TenantPolicy, member
from gateway.types import Principal
from gateway.units import WrongValue

LONGEST_TOKEN = 16 * 1024  # bytes
SMALLEST_RSA = 2048  # bits
MOST_TRIED = 10  # keys that one token is checked against
MOST_KEYS = 500  # in a key set
MOST_MODELS = 100  # patterns in a token

# Algorithm -> type and curve of the keys that may verify it. What is not here does not exist, whatever a token says.
_FITS: dict[str, tuple[str, str | None]] = {
    "RS256": ("RSA", None), "RS384": ("RSA", None), "RS512": ("RSA", None),
    "ES256": ("EC", "P-256"), "ES384": ("EC", "P-384"), "ES512": ("EC", "P-521"),
}  # fmt: skip
# The public numbers of a key and the longest text of each: a long exponent makes every verification slow.
_NUMBERS = {"RSA": {"n": 2731, "e": 8}, "EC": {"x": 88, "y": 88}}
_ROLES = ("admin", "operator", "user")  # highest first
_ABSENT = object()
_GLOBS = TypeAdapter(tuple[Glob, ...])


class Verifier(Protocol):
    """A public key for one algorithm."""

    def verify(self, msg: bytes, sig: bytes) -> bool: ...


@dataclass(frozen=True, slots=True)
class PublicKey:
    """One key of an issuer. Equal keys have the same name, the same numbers and the same algorithms."""

    kid: str | None
    algorithms: tuple[str, ...]
    numbers: tuple[str, ...] = field(repr=False)
    verifiers: Mapping[str, Verifier] = field(repr=False, compare=False)  # by algorithm


@dataclass(frozen=True, slots=True)
class SignedToken:
    """A token taken apart. Nothing in it is to be believed before `is_signed` and `check_times`."""

    algorithm: str
    kid: str | None
    claims: Mapping[str, object] = field(repr=False)
    signed: bytes = field(repr=False)  # header and payload as they were signed
    signature: bytes = field(repr=False)
    digest: bytes = field(repr=False)  # SHA-256 of the whole token


class UnusableKeys(ValueError):
    """The document is no key set."""


# --- keys
def read_keys(document: bytes) -> tuple[PublicKey, ...]:
    """The usable signing keys of a JWK set; others in it (for encryption, shared secrets, too short) are left out.

    Raises: UnusableKeys.
    """
    entries = _object(document, UnusableKeys("not JSON")).get("keys")
    if not isinstance(entries, list) or len(entries) > MOST_KEYS:
        raise UnusableKeys("not a key set")
    return tuple(key for entry in entries if isinstance(entry, dict) and (key := _public_key(entry)) is not None)


def _public_key(entry: Mapping[str, object]) -> PublicKey | None:
    kid, kind, curve, alg = (entry.get(name) for name in ("kid", "kty", "crv", "alg"))
    algorithms = tuple(name for name, fit in _FITS.items() if fit in ((kind, curve), (kind, None)))
    if alg is not None:
        algorithms = tuple(name for name in algorithms if name == alg)
    if not algorithms or not (kid is None or isinstance(kid, str)) or not _is_for_signatures(entry):
        return None
    # Only the public numbers get into the key: a stray secret of a key set cannot be used, nor end up in an error.
    numbers = {name: _text(entry, name, longest) for name, longest in _NUMBERS[str(kind)].items()}
    if "" in numbers.values():
        return None
    try:
        verifiers = {name: _verifier({"kty": kind, "crv": curve} | numbers, name) for name in algorithms}
    except (JWKError, ValueError):  # numbers that are none, points beside their curve
        return None
    return PublicKey(kid, algorithms, (str(kind), *numbers.values()), verifiers)


def _verifier(parts: Mapping[str, object], algorithm: str) -> Verifier:
    """Raises: JWKError, ValueError."""
    key = jwk.construct(parts, algorithm)
    if parts["kty"] == "RSA" and key.prepared_key.key_size < SMALLEST_RSA:
        raise ValueError("too short to be safe")
    verifier: Verifier = key
    return verifier


def _is_for_signatures(entry: Mapping[str, object]) -> bool:
    """False for keys meant for encryption, and for private keys: whoever has read the set could sign with those."""
    operations = entry.get("key_ops", ["verify"])
    if not isinstance(operations, list) or "verify" not in operations:
        return False
    return entry.get("use", "sig") == "sig" and "d" not in entry


def _text(entry: Mapping[str, object], name: str, longest: int) -> str:
    value = entry.get(name)
    return value if isinstance(value, str) and len(value) <= longest else ""


# --- the token
def parse(token: bytes) -> SignedToken:
    """Raises: AuthError for what is no signed token, or asks for more than a signature of a known algorithm."""
    parts = token.split(b".")
    if len(token) > LONGEST_TOKEN or len(parts) != 3:
        raise AuthError("not a signed token")
    header = _object(_decoded(parts[0]), AuthError("the token's header is not readable"))
    claims = _object(_decoded(parts[1]), AuthError("the token's claims are not readable"))
    if "crit" in header:
        raise AuthError("the token demands an extension")
    # Keys and addresses in the header (jwk, jku, x5c, x5u) are never looked at: its author could be anybody.
    algorithm, kid = header.get("alg"), header.get("kid")
    if not isinstance(algorithm, str) or algorithm not in _FITS or not (kid is None or isinstance(kid, str)):
        raise AuthError("the token is not signed with an algorithm that is accepted")
    signed = token[: len(parts[0]) + 1 + len(parts[1])]
    return SignedToken(algorithm, kid, claims, signed, _decoded(parts[2]), hashlib.sha256(token).digest())


def _decoded(part: bytes) -> bytes:
    """base64url by the letter. Python's decoder skips strange characters and ignores spare bits, so that many texts
    would be the same token."""
    try:
        data = base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4))
    except ValueError:
        data = b""
    if base64.urlsafe_b64encode(data).rstrip(b"=") != part:
        raise AuthError("the token is not base64url")
    return data


def _object(data: bytes, otherwise: Exception) -> dict[str, object]:
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise otherwise
    return found


# --- what has to be true of it
def addressed(token: SignedToken, issuers: Iterable[JwtConfig]) -> list[JwtConfig]:
    """The entries of the configuration that the token may be for: of its issuer, algorithm and audience.

    Raises: AuthError when there is none. Whether it really is of that issuer is what `is_signed` tells.
    """
    found = [entry for entry in issuers if token.claims.get("iss") == entry.issuer]
    if not found:
        raise AuthError("the token's issuer is not configured")
    found = [entry for entry in found if token.algorithm in entry.algorithms]
    if not found:
        raise AuthError("the token is not signed with an algorithm that is accepted")
    audience = token.claims.get("aud")
    names = audience if isinstance(audience, list) else [audience]
    if not all(isinstance(name, str) for name in names):
        raise AuthError("the token's audience is malformed")
    found = [entry for entry in found if entry.audience in names]
    if not found:
        raise AuthError("the token is for another audience")
    return found


def check_times(token: SignedToken, issuer: JwtConfig, now: float) -> float:
    """Until when the token is accepted, the issuer's leeway included. Unix seconds, like `now`.

    Raises: AuthError unless it is valid at `now`, give or take the leeway.
    """
    expires, begins, issued = (_moment(token, name) for name in ("exp", "nbf", "iat"))
    if expires is None:
        raise AuthError("the token never expires")
    if expires + issuer.leeway <= now:
        raise AuthError("the token has expired")
    if begins is not None and begins - issuer.leeway > now:
        raise AuthError("the token is not valid yet")
    if issued is not None and issued - issuer.leeway > now:
        raise AuthError("the token was issued in the future")
    return expires + issuer.leeway


def _moment(token: SignedToken, name: str) -> float | None:
    value = token.claims.get(name)
    if value is None and name not in token.claims:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise AuthError(f"the token's {name} is not a number")
    return float(value)


def is_signed(token: SignedToken, keys: Sequence[PublicKey]) -> bool:
    """Whether one of `keys` signed it: the one it names, or one that has no name, or any where it names none."""
    fitting = [
        key for key in keys
        if token.algorithm in key.verifiers and (token.kid is None or key.kid is None or key.kid == token.kid)
    ]  # fmt: skip
    fitting.sort(key=lambda key: key.kid != token.kid)
    return any(key.verifiers[token.algorithm].verify(token.signed, token.signature) for key in fitting[:MOST_TRIED])


# --- whom it stands for
def subject(token: SignedToken, issuer: JwtConfig, tenants: Mapping[str, TenantPolicy], expires: float) -> Principal:
    """The caller, for a token whose signature and times (hence `expires`) have been checked. Raises: AuthError."""
    tenant = _claim(token, issuer.tenant_claim)
    policy = tenants.get(tenant) if isinstance(tenant, str) else None
    if policy is None:
        raise AuthError("the token names no tenant that exists")
    role = _role(_claim(token, issuer.role_claim))
    models = _models(_claim(token, issuer.models_claim))
    return member(policy, _name(token, issuer), role, models, expires, token.digest)


def _claim(token: SignedToken, name: str) -> object:
    """The claim of that literal name, as in `https://id.example/tenant`, else the one at that path, as in
    `realm_access.tenant`, else _ABSENT."""
    if name in token.claims:
        return token.claims[name]
    found: object = token.claims
    for step in name.split("."):
        if not isinstance(found, dict) or step not in found:
            return _ABSENT
        found = found[step]
    return found


def _role(claim: object) -> str:
    """The highest role among the values; whatever else a provider puts there is none of ours."""
    values = claim if isinstance(claim, list) else [claim]
    return next((role for role in _ROLES if role in values), "user")


def _models(claim: object) -> tuple[str, ...] | None:
    """Patterns; None = all of the tenant's. A restriction that cannot be read must not become none."""
    if claim is _ABSENT:
        return None
    patterns = claim.split() if isinstance(claim, str) else claim
    if not isinstance(patterns, list) or len(patterns) > MOST_MODELS:
        raise AuthError("the token's models are malformed")
    try:
        return _GLOBS.validate_python(patterns)
    except ValidationError:
        raise AuthError("the token's models are malformed") from None


def _name(token: SignedToken, issuer: JwtConfig) -> str:
    """What logs and usage call the caller: the subject where it is fit to be shown, else a fingerprint of it."""
    subject = token.claims.get("sub", "")
    if not isinstance(subject, str):
        raise AuthError("the token's subject is malformed")
    try:
        return f"jwt:{tenant_name(subject)}"
    except WrongValue:
        fingerprint = hashlib.sha256(f"{issuer.issuer}\n{subject}".encode()).hexdigest()
        return f"jwt:{fingerprint[:12]}"
