"""The tools that a tenant may use. Tenants from before may use every one: null."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0002"
down_revision = "0001"


def upgrade(operations: Operations) -> None:
    postgres = operations.get_bind().dialect.name == "postgresql"
    operations.add_column("tenants", sa.Column("tools", sa.Text(collation="C") if postgres else sa.Text()))
