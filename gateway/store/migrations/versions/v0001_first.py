"""The first tables, and the triggers that keep the audit log append-only."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0001"
down_revision = None

_REFUSAL = "the audit log is append-only"


def upgrade(operations: Operations) -> None:
    connection = operations.get_bind()
    postgres = connection.dialect.name == "postgresql"
    words = sa.Text(collation="C") if postgres else sa.Text()
    seq = sa.BigInteger() if postgres else sa.Integer()  # an INTEGER key is SQLite's own row number
    _people(operations, words)
    _usage(operations, words)
    _audit(operations, words, seq)
    for statement in _POSTGRES_TRIGGERS if postgres else _SQLITE_TRIGGERS:
        connection.exec_driver_sql(statement)


def _people(operations: Operations, words: sa.Text) -> None:
    operations.create_table(
        "tenants",
        sa.Column("name", words, primary_key=True),
        sa.Column("models", words, nullable=False),
        sa.Column("limits", words, nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("deleted_at", sa.Double()),
        sa.Column("changed", sa.BigInteger(), nullable=False),
    )
    operations.create_index("tenants_changed", "tenants", ["changed"])
    operations.create_table(
        "keys",
        sa.Column("id", words, primary_key=True),
        sa.Column("tenant", words, nullable=False),
        sa.Column("name", words, nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("role", words, nullable=False),
        sa.Column("models", words),
        sa.Column("limits", words, nullable=False),
        sa.Column("allow_from", words, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.Column("revoked_at", sa.Double()),
        sa.Column("rotated_from", words),
        sa.Column("changed", sa.BigInteger(), nullable=False),
    )
    operations.create_index("keys_digest", "keys", ["digest"], unique=True)
    operations.create_index("keys_tenant_name", "keys", ["tenant", "name"])
    operations.create_index("keys_rotated_from", "keys", ["rotated_from"])
    operations.create_index("keys_changed", "keys", ["changed"])
    operations.create_table(
        "key_use",
        sa.Column("key", words, primary_key=True),
        sa.Column("last_used_at", sa.Double(), nullable=False),
    )


def _usage(operations: Operations, words: sa.Text) -> None:
    operations.create_table(
        "usage",
        sa.Column("id", words, primary_key=True),
        sa.Column("time", sa.Double(), nullable=False),
        *(
            sa.Column(name, words, nullable=False)
            for name in ("request_id", "tenant", "key", "model", "asked", "replica", "operation")
        ),
        sa.Column("stream", sa.SmallInteger(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("code", words, nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("prompt", "cached", "completion", "reasoning")),
        sa.Column("source", words, nullable=False),
        sa.Column("ttft_ms", sa.Double()),
        sa.Column("duration_ms", sa.Double(), nullable=False),
    )
    operations.create_index("usage_time", "usage", ["time", "id"])
    operations.create_index("usage_tenant_time", "usage", ["tenant", "time"])


def _audit(operations: Operations, words: sa.Text, seq: sa.BigInteger | sa.Integer) -> None:
    operations.create_table(
        "audit",
        sa.Column("seq", seq, primary_key=True, autoincrement=False),
        sa.Column("time", sa.Double(), nullable=False),
        *(sa.Column(name, words, nullable=False) for name in ("actor", "address", "action", "target")),
        sa.Column("before", sa.Text()),
        sa.Column("after", sa.Text()),
        sa.Column("previous", sa.Text(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
    )
    state = operations.create_table(
        "state",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("audit_entries", sa.BigInteger(), nullable=False),
        sa.Column("audit_head", sa.Text(), nullable=False),
    )
    operations.bulk_insert(state, [{"id": 1, "version": 0, "audit_entries": 0, "audit_head": "0" * 64}])


_SQLITE_TRIGGERS = (
    *(
        f"CREATE TRIGGER audit_no_{verb} BEFORE {verb.upper()} ON audit BEGIN SELECT RAISE(ABORT, '{_REFUSAL}'); END"
        for verb in ("update", "delete")
    ),
    # SQLite deletes without asking the trigger above when a row is inserted with OR REPLACE.
    "CREATE TRIGGER audit_no_replace BEFORE INSERT ON audit WHEN EXISTS (SELECT 1 FROM audit WHERE seq = NEW.seq) "
    f"BEGIN SELECT RAISE(ABORT, '{_REFUSAL}'); END",
)
_POSTGRES_TRIGGERS = (
    "CREATE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS "
    f"$$ BEGIN RAISE EXCEPTION '{_REFUSAL}'; END $$",
    "CREATE TRIGGER audit_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
    "FOR EACH STATEMENT EXECUTE FUNCTION audit_is_append_only()",
)
