"""Field types of the configuration that are more than a number or a word: names, URLs, paths, networks, globs.

Validators raise `WrongValue` and never repeat what they were given. Paths are made absolute against
`context["folder"]`, the folder of the configuration file, when validation has that context.
"""

import ipaddress
import re
from collections.abc import Mapping
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Annotated, TypeAlias
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationInfo, WithJsonSchema

from gateway.units import WrongValue

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,63}")
_WORD = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252})")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _model_name(value: str) -> str:
    if not 0 < len(value) <= 200 or not value.isprintable() or any(char.isspace() or char in "@*?[]" for char in value):
        hint = "write up to 200 printable characters without spaces, `@` (it selects a variant) or glob characters"
        raise WrongValue("not a model name", hint)
    return value


def tenant_name(value: str) -> str:
    """`value` when tenants and keys may be called so.

    Raises: WrongValue: empty, too long, or with other characters.
    """
    if not _TENANT_NAME.fullmatch(value):
        raise WrongValue("not a name", "write up to 64 letters, digits or . _ : @ + - and begin with a letter or digit")
    return value


def _word(value: str) -> str:
    if not _WORD.fullmatch(value.lower()):
        raise WrongValue("not a single word", "write letters, digits or . _ - without spaces")
    return value.lower()


def _engine_text(value: str) -> str:
    if not value or len(value) > 500 or not value.isprintable():
        raise WrongValue("empty or not printable", "write the text, or leave the key out")
    return value


def _sha256(value: str) -> str:
    if not _SHA256.fullmatch(value.lower()):
        raise WrongValue("not a SHA-256", "write its 64 hex characters")
    return value.lower()


def _key_sha256(value: str) -> str:
    if value.startswith("sk-"):
        raise WrongValue("this is the key itself", "write its SHA-256, as `sekisho keys create --print` shows it")
    return _sha256(value)


def _glob(value: str) -> str:
    """A pattern for fnmatch: `*`, `?` and `[a-z]`, with every `[` closed."""
    hint = "write a name where * stands for any text, ? for one character and [abc] for one of these"
    if not value or len(value) > 200 or not value.isprintable() or any(char.isspace() for char in value):
        raise WrongValue("not a glob", hint)
    if "[" in re.sub(r"\[!?[^\]]+\]", "", value):  # fnmatch reads an open bracket as a plain character, silently
        raise WrongValue("not a glob: `[` is never closed", hint)
    return value


def _network(value: object) -> Network:
    if isinstance(value, ipaddress.IPv4Network | ipaddress.IPv6Network):
        return value
    try:
        if not isinstance(value, str):  # ip_network takes a bare int for an address
            raise ValueError
        network = ipaddress.ip_network(value, strict=False)
    except ValueError:
        raise WrongValue("not a network", "write an address or a CIDR such as 10.0.0.0/8 or ::1") from None
    if "/" in value and ipaddress.ip_interface(value).ip != network.network_address:
        raise WrongValue("an address inside a network, not a network", f"write {network} or the address alone")
    return network


def _listen_host(value: str) -> str:
    host = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if not _HOST.fullmatch(host) and not _is_ipv6(host):
        raise WrongValue("not a host", "write an address such as 127.0.0.1, 0.0.0.0 or ::, the port has its own key")
    return host


def _media_host(value: str) -> str:
    if not _HOST.fullmatch(value) and not _is_ipv6(value):
        raise WrongValue("not a host name", "write each host in full, without scheme, port, path or *")
    return value.lower()


def _is_ipv6(value: str) -> bool:
    try:
        return isinstance(ipaddress.ip_address(value), ipaddress.IPv6Address)
    except ValueError:
        return False


def _origin(value: str) -> str:
    if value == "*":
        return value
    parts = split_url(value, ("http", "https"), "write an origin such as https://app.example, or *")
    if parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        raise WrongValue("an origin has no path", "write only scheme, host and port, as in https://app.example")
    return value.lower()


def _engine_url(value: str) -> str:
    """`http(s)://host[:port][/prefix]` or `unix:/socket`, without a trailing slash or `/v1`, which the gateway adds."""
    hint = "write http://host:port, https://host:port or unix:/path/to.sock"
    if value.startswith("unix:"):
        socket = "/" + value.removeprefix("unix:").lstrip("/")
        if not value.removeprefix("unix:").startswith("/") or socket == "/" or not socket.isprintable():
            raise WrongValue("not a socket path", "write unix: and an absolute path, as in unix:/run/engine.sock")
        return "unix:" + socket
    parts = split_url(value, ("http", "https"), hint)
    if "@" in parts.netloc:
        raise WrongValue("credentials in the URL", "put them in `api_key`")
    if "?" in value or "#" in value:
        raise WrongValue("a query or fragment in the URL", "leave off everything from the ? or # on")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1').rstrip('/')}"


def _web_url(value: str) -> str:
    parts = split_url(value, ("http", "https"), "write https:// and the address")
    loopback = is_loopback(parts.hostname or "")
    if "@" in parts.netloc or (parts.scheme == "http" and not loopback):
        raise WrongValue("not an https:// address", "write https://: whoever can change this answer can sign tokens")
    return value


def _database_url(value: SecretStr, info: ValidationInfo) -> SecretStr:
    url = value.get_secret_value()
    if url.startswith(("postgresql://", "postgresql+asyncpg://")):
        split_url(url, ("postgresql", "postgresql+asyncpg"), "write postgresql://user:password@host:5432/name")
        return value
    if not url.startswith("sqlite:///") or url == "sqlite:///":
        raise WrongValue("not a database URL", "write sqlite:///file.db or postgresql://user:password@host:5432/name")
    file = url.removeprefix("sqlite:///")
    return value if file == ":memory:" else SecretStr(f"sqlite:///{_resolve(Path(file), info)}")


def _redis_url(value: SecretStr) -> SecretStr:
    url, hint = value.get_secret_value(), "write redis://host:6379/0, rediss://host:6379/0 or unix:///path/to.sock"
    if not url.startswith("unix:///"):
        split_url(url, ("redis", "rediss"), hint)
    return value


def _secret(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if not text or not text.isascii() or not text.isprintable() or " " in text:  # it becomes a header value
        raise WrongValue("empty, or holds spaces or characters a header cannot carry", "write the key alone")
    return value


def _collector_url(value: str) -> str:
    parts = split_url(value, ("http", "https"), "write http://host:4318/v1/traces")
    if "@" in parts.netloc:
        raise WrongValue("credentials in the URL", "put them in `headers`")
    if not parts.path.strip("/"):
        raise WrongValue("a collector's address without a path", "append /v1/traces, which is the usual one")
    return value


def _header_name(value: str) -> str:
    if not _TOKEN.fullmatch(value):
        raise WrongValue("not a header name", "write letters, digits and hyphens")
    return value


def _header_value(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if not text or not text.isascii() or not text.isprintable() or text != text.strip():
        raise WrongValue("empty, or holds characters a header cannot carry", "write the value alone")
    return value


def split_url(value: str, schemes: tuple[str, ...], hint: str) -> SplitResult:
    """The parts of a URL that has one of `schemes`, a host and a port that is a number.

    Raises: WrongValue: with `hint`, never the URL, which may hold a password.
    """
    try:
        parts = urlsplit(value)
        wrong = parts.scheme not in schemes or not parts.hostname or parts.port == 0
    except ValueError:  # a port that is no number, or an unclosed [
        wrong = True
    if wrong or not value.isprintable() or " " in value:
        raise WrongValue("not a usable URL", hint)
    return parts


def is_loopback(host: str) -> bool:
    """True for 127.0.0.0/8, ::1 and `localhost`: what only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback if host.lower() != "localhost" else True
    except ValueError:
        return False


def _resolve(path: Path, info: ValidationInfo) -> Path:
    folder = info.context.get("folder") if isinstance(info.context, Mapping) else None
    home = path.expanduser() if str(path).startswith("~") else path
    return Path(folder, home) if isinstance(folder, Path) else home


def _file_path(value: object, info: ValidationInfo) -> Path:
    if isinstance(value, str | Path) and str(value) and "\0" not in str(value):
        return _resolve(Path(value), info)
    raise WrongValue("not a path", "write the path of a file, relative ones start at this file's folder")


def _expires(value: object) -> datetime:
    """A moment in UTC. A date alone is its first instant; a time without a zone is read as UTC."""
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        moment = None
    if isinstance(moment, date) and not isinstance(moment, datetime):
        moment = datetime.combine(moment, time())
    if not isinstance(moment, datetime):
        raise WrongValue("not a date", "write 2027-01-31 or 2027-01-31T18:00:00Z")
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _no_boolean(value: object) -> object:
    if isinstance(value, bool):     # pydantic would take `true` for 1
        raise WrongValue("not a number", "write digits only")
    return value


def quoted_number(value: object) -> object:
    """The text of a float, since `min_version: 1.2` without quotes is a float in YAML; anything else unchanged."""
    return str(value) if isinstance(value, float) else value


ModelName = Annotated[str, AfterValidator(_model_name)]
TenantName = Annotated[str, AfterValidator(tenant_name)]
Word = Annotated[str, AfterValidator(_word)]
EngineText = Annotated[str, AfterValidator(_engine_text)]
Sha256 = Annotated[str, AfterValidator(_sha256)]
KeySha256 = Annotated[str, AfterValidator(_key_sha256)]
Glob = Annotated[str, AfterValidator(_glob)]
NetworkField = Annotated[Network, BeforeValidator(_network), WithJsonSchema({"type": "string"})]
ListenHost = Annotated[str, AfterValidator(_listen_host)]
MediaHost = Annotated[str, AfterValidator(_media_host)]
Origin = Annotated[str, AfterValidator(_origin)]
EngineUrl = Annotated[str, AfterValidator(_engine_url)]
WebUrl = Annotated[str, AfterValidator(_web_url)]
DatabaseUrl = Annotated[SecretStr, AfterValidator(_database_url)]
RedisUrl = Annotated[SecretStr, AfterValidator(_redis_url)]
Secret = Annotated[SecretStr, AfterValidator(_secret)]
CollectorUrl = Annotated[str, AfterValidator(_collector_url)]
HeaderName = Annotated[str, AfterValidator(_header_name)]
HeaderValue = Annotated[SecretStr, AfterValidator(_header_value)]
FilePath = Annotated[Path, BeforeValidator(_file_path), WithJsonSchema({"type": "string"})]
Moment = Annotated[
    datetime,
    BeforeValidator(_expires),
    WithJsonSchema({"type": "string", "pattern": r"^[0-9]{4}-[0-9]{2}-[0-9]{2}|\$\{"}),
]
# Bounds stand before the check for booleans: after it pydantic would not put them into the JSON Schema.
Whole = Annotated[int, BeforeValidator(_no_boolean)]
Count = Annotated[int, Field(ge=1), BeforeValidator(_no_boolean)]
Weight = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False), BeforeValidator(_no_boolean)]
