"""API keys: how one is made and what is stored of it. Only the digest is ever kept."""

import hashlib
import secrets

_PREFIX = "sk-"
_RANDOM_BYTES = 36  # 288 bits, exactly 48 characters of base64: guessing is hopeless, so no slow hash is needed


def new_key() -> str:
    """A fresh key: "sk-" and 48 URL-safe characters from the system's random source."""
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def digest(key: str) -> str:
    """Hex SHA-256 of the whole key, prefix included: the `sha256` of the configuration and of the key store."""
    return hashlib.sha256(key.encode()).hexdigest()
