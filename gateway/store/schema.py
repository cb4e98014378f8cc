"""The tables, as the newest migration leaves them. Moments are Unix seconds, JSON is kept as text.

Text compares by code point on both databases, so that an order means the same wherever a gateway keeps its data.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Dialect,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    TypeDecorator,
)
from sqlalchemy.types import TypeEngine

metadata = MetaData()


def storable(text: str) -> str:
    """`text` without what PostgreSQL cannot keep: zero characters and halves of surrogate pairs."""
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


class Words(TypeDecorator[str]):
    """Text, made storable on its way in. A filter that a client made up finds nothing then, instead of failing."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[str]:
        return Text(collation="C") if dialect.name == "postgresql" else Text()

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else storable(value)


# One row. Who changes tenants, keys or the audit log holds its lock until the commit: changes come one at a time.
state = Table(
    "state",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),  # number of the last change to tenants or keys
    Column("audit_entries", BigInteger, nullable=False),
    Column("audit_head", Text, nullable=False),  # hash of the last entry
)

tenants = Table(
    "tenants",
    metadata,
    Column("name", Words, primary_key=True),
    Column("models", Words, nullable=False),
    Column("limits", Words, nullable=False),
    Column("weight", Double, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("deleted_at", Double),
    Column("changed", BigInteger, nullable=False),  # version of its last change
    Column("tools", Words),  # null = every tool
    Index("tenants_changed", "changed"),
)

keys = Table(
    "keys",
    metadata,
    Column("id", Words, primary_key=True),
    Column("tenant", Words, nullable=False),
    Column("name", Words, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("role", Words, nullable=False),
    Column("models", Words),
    Column("limits", Words, nullable=False),
    Column("allow_from", Words, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    Column("rotated_from", Words),
    Column("changed", BigInteger, nullable=False),
    Index("keys_digest", "digest", unique=True),
    Index("keys_tenant_name", "tenant", "name"),
    Index("keys_rotated_from", "rotated_from"),
    Index("keys_changed", "changed"),
)

# Apart from `keys`: that a key was used is neither a change to it nor worth an entry in the audit log.
key_use = Table(
    "key_use",
    metadata,
    Column("key", Words, primary_key=True),
    Column("last_used_at", Double, nullable=False),
)

# Columns in the order of UsageRow.
usage = Table(
    "usage",
    metadata,
    Column("id", Words, primary_key=True),
    Column("time", Double, nullable=False),
    Column("request_id", Words, nullable=False),
    Column("tenant", Words, nullable=False),
    Column("key", Words, nullable=False),
    Column("model", Words, nullable=False),
    Column("asked", Words, nullable=False),
    Column("replica", Words, nullable=False),
    Column("operation", Words, nullable=False),
    Column("stream", SmallInteger, nullable=False),
    Column("status", Integer, nullable=False),
    Column("code", Words, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("prompt", BigInteger, nullable=False),
    Column("cached", BigInteger, nullable=False),
    Column("completion", BigInteger, nullable=False),
    Column("reasoning", BigInteger, nullable=False),
    Column("source", Words, nullable=False),
    Column("ttft_ms", Double),
    Column("duration_ms", Double, nullable=False),
    Index("usage_time", "time", "id"),
    Index("usage_tenant_time", "tenant", "time"),
)

# Triggers refuse to change or delete its rows.
audit = Table(
    "audit",
    metadata,
    Column("seq", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("time", Double, nullable=False),
    Column("actor", Words, nullable=False),
    Column("address", Words, nullable=False),
    Column("action", Words, nullable=False),
    Column("target", Words, nullable=False),
    Column("before", Text),
    Column("after", Text),
    Column("previous", Text, nullable=False),
    Column("hash", Text, nullable=False),
)
