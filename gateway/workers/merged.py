"""The metrics of several worker processes as one page: counters never fall, and a gauge has one meaning for all.

Counters and histograms are sums, those of workers that have ended included. Most gauges are sums too: open requests,
queues, memory. Those of which every worker has its own view of one and the same thing follow `RULES`. Dead workers'
gauges are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import TypeAlias

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

Families: TypeAlias = Sequence[Metric]
Key: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]  # sample name, labels
Rule: TypeAlias = Callable[[float, float], float]

ADDED_UP = frozenset({"counter", "histogram", "summary"})

# The engine's own word is the same whoever asks; the newest cannot be told from the others, so the highest counts.
RULES: Mapping[str, Rule] = {
    "sekisho_replica_up": max,  # 1 when any worker sends it requests
    "sekisho_replica_running": max,
    "sekisho_replica_waiting": max,
    "sekisho_replica_kv_usage_ratio": max,
    "sekisho_replica_prefix_hit_ratio": max,
    "sekisho_build_info": max,
    "sekisho_database_up": min,  # 0 when it fails for any worker
    "sekisho_limit_store_up": min,
    "sekisho_usage_failing": max,
    "sekisho_certificate_expiry_timestamp_seconds": min,  # the old one while some worker has not taken the new one
    "process_start_time_seconds": min,
    "process_max_fds": max,
    "process_virtual_memory_max_bytes": max,
}


def merge(pages: Iterable[Families]) -> list[Metric]:
    """One page out of several; families in the order in which they are met first."""
    found: dict[str, tuple[Metric, dict[Key, Sample]]] = {}
    for page in pages:
        for family in page:
            known = found.get(family.name)
            if known is None:
                known = found[family.name] = _without_samples(family), {}
            rule = _add if family.type in ADDED_UP else RULES.get(family.name, _add)
            _take(known[1], family.samples, rule)
    for family, samples in found.values():
        family.samples = list(samples.values())
    return [family for family, _ in found.values()]


def lasting(page: Families) -> list[Metric]:
    """What stays of a worker that has ended: what it has counted."""
    return [family for family in page if family.type in ADDED_UP]


def _take(samples: dict[Key, Sample], more: Iterable[Sample], rule: Rule) -> None:
    for sample in more:
        key = sample.name, tuple(sorted(sample.labels.items()))
        known = samples.get(key)
        if known is not None:
            exemplar = sample.exemplar or known.exemplar
            sample = sample._replace(value=rule(known.value, sample.value), exemplar=exemplar)
        samples[key] = sample


def _without_samples(family: Metric) -> Metric:
    bare = copy(family)
    bare.samples = []
    return bare


def _add(one: float, other: float) -> float:
    return one + other
