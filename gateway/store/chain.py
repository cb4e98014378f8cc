"""The audit log as a chain of hashes: what an entry's hash covers, and how a chain is checked. No I/O.

An entry's `hash` is SHA-256 over the canonical JSON of its other fields, among them the hash of the entry before.
Changing, removing, adding or moving an entry breaks the chain from there on. Cutting off its end does not, which is
why `state` holds the number of entries and the last hash. Whoever may write to all tables and drop triggers can still
forge the log as a whole, chain and `state` alike: only a hash that was kept elsewhere shows that. `AuditVerdict.head`
is the one to print or keep, and `expect` the place to hand it in again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.records import AuditEntry

GENESIS = "0" * 64  # what the first entry has for the hash before


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """Whether the audit log is as it was written."""

    ok: bool
    entries: int  # intact ones, from the first on
    head: str  # hash of the last intact entry
    problem: str = ""  # a sentence, empty when all is well
    broken_at: int | None = None  # `seq` of the first entry that is wrong or missing


def canonical(value: object) -> str:
    """The one way to write a JSON value. Raises: TypeError, ValueError: it is none."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def entry_hash(fields: Mapping[str, Any]) -> str:
    """The hash of an entry's fields without `hash`. Raises: TypeError, ValueError: they are no JSON."""
    return hashlib.sha256(canonical(fields).encode()).hexdigest()


def entry(stored: Mapping[str, Any]) -> AuditEntry:
    """An entry from its row. Raises: ValueError: `before` or `after` is no JSON."""
    before, after = (None if text is None else json.loads(text) for text in (stored["before"], stored["after"]))
    return AuditEntry(**{**stored, "before": before, "after": after})


class Walk:
    """Follows a chain from its first entry; `entries` and `head` say how far it was right."""

    def __init__(self, expect: str | None = None) -> None:
        self.entries, self.head = 0, GENESIS
        self._missing = expect  # a hash that has to occur

    def step(self, stored: Mapping[str, Any]) -> str:
        """Takes the next entry, as its row. Returns what is wrong with it, or nothing."""
        if stored["seq"] > self.entries + 1:
            return f"entry {self.entries + 1} is missing"
        if stored["seq"] <= self.entries:
            return f"entry {stored['seq']} does not belong here"
        if stored["previous"] != self.head:
            return f"entry {stored['seq']} does not follow the entry before it"
        if not _is_intact(stored):
            return f"entry {stored['seq']} was changed"
        self.entries, self.head = stored["seq"], stored["hash"]
        if self.head == self._missing:
            self._missing = None
        return ""

    def finish(self, entries: int, head: str) -> str:
        """Compares with what `state` holds. Returns what is wrong, or nothing."""
        if self.entries < entries:
            return f"the last entries are missing: {entries} were written, {self.entries} are there"
        if (self.entries, self.head) != (entries, head):
            return f"the end was forged: {entries} entries were written, and the last one was another"
        if self._missing is not None:
            return "the expected hash does not occur: the log was replaced, or cut off before that entry"
        return ""


def _is_intact(stored: Mapping[str, Any]) -> bool:
    """Whether the hash fits, and JSON is written as this program writes it (a duplicate name would hide from it)."""
    try:
        found = entry(stored)
        texts = [None if value is None else canonical(value) for value in (found.before, found.after)]
        fields = {name: value for name, value in stored.items() if name != "hash"}
        right = entry_hash(fields | {"before": found.before, "after": found.after}) == stored["hash"]
    except (TypeError, ValueError):  # SQLite keeps anything anywhere, bytes among it
        return False
    return right and texts == [stored["before"], stored["after"]]
