"""The dashboards: `python deploy/grafana/build.py` writes their files. With `--check` it ends with code 1 if one
is not what would be written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from panels import JSON, choice, dashboard, heading, heat, lines, number, rows, source, states

FOLDER = Path(__file__).parent / "dashboards"

AT = 'instance=~"$instance"'
OF = f'{AT},model=~"$model"'
TENANTS = f'{AT},tenant=~"$tenant"'
BY = f'{OF},tenant=~"$tenant"'
DURATION, TTFT, TPOT, WAIT, OVERHEAD = (
    f"sekisho_{name}_seconds"
    for name in ("request_duration", "time_to_first_token", "time_per_output_token", "queue_wait", "overhead")
)
QUANTILES = (0.5, 0.95, 0.99)
BUDGET = 0.005  # share of requests that may fail: docs/monitoring.md

INSTANCE = choice("instance", "Gateway", "label_values(sekisho_build_info, instance)")
MODEL = choice("model", "Model", f"label_values(sekisho_replica_up{{{AT}}}, model)", everything=".*")
TENANT = choice("tenant", "Tenant", f"label_values(sekisho_requests_total{{{AT}}}, tenant)", everything=".*")


def rate(metric: str, by: str, where: str) -> str:
    """Per second, added up over the rest."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{where}}}[$__rate_interval]))"


def quantile(share: float, metric: str, by: str, where: str) -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', labels, where)})"


def quantiles(title: str, metric: str, where: str, text: str = "") -> JSON:
    queries = [(quantile(share, metric, "model", where), f"{{{{model}}}} p{share * 100:g}") for share in QUANTILES]
    return lines(title, "s", *queries, text=text, exemplars=True)


def overview() -> JSON:
    requests = "sekisho_requests_total"
    served = f'{BY},status!~"4.."'
    failed = f'{BY},status=~"5.."'
    firing = 'ALERTS{alertname=~"Sekisho.*",alertstate="firing"}'
    spent = "avg_over_time(job:sekisho_slo_errors:rate5m[30d]) / avg_over_time(job:sekisho_slo_requests:rate5m[30d])"
    panels = [
        number("Gateways", "none", f"count(sekisho_build_info{{{AT}}})"),
        number("Requests per second", "reqps", rate(requests, "", BY)),
        number("Failed", "percentunit", f"{rate(requests, '', failed)} / {rate(requests, '', served)}",
               text="Share of 5xx, without what callers did wrong (4xx).", limits=(BUDGET, 5 * BUDGET)),
        number("Replicas up", "percentunit", f"avg(sekisho_replica_up{{{OF}}})", limits=(0.5, 1), low=True),
        number("In flight", "none", f"sum(sekisho_inflight_requests{{{OF}}})"),
        number("Waiting", "none", f"sum(sekisho_queue_depth{{{OF}}})", limits=(1, 20)),
        heading("Traffic"),
        lines("Requests by model", "reqps", (rate(requests, "model", BY), "{{model}}"), stacked=True),
        lines("Requests by status", "reqps", (rate(requests, "status", BY), "{{status}}"), stacked=True,
              text="The true outcome: a stream that broke after it had begun with 200 is a 502. 499: the client left."),
        lines("Requests by tenant", "reqps", (rate(requests, "tenant", BY), "{{tenant}}"), stacked=True),
        lines("Requests by operation", "reqps", (rate(requests, "operation", BY), "{{operation}}"), stacked=True),
        heading("What went wrong"),
        lines("Errors by code", "reqps", (rate(requests, "code", f'{BY},code!=""'), "{{code}}"), stacked=True),
        lines("Rejected by reason", "reqps",
              (rate("sekisho_rejected_total", "reason", TENANTS), "{{reason}}"), stacked=True,
              text="Refused before an engine was asked."),
        rows("Firing alerts", f"sum by (alertname, severity, instance, model, replica) ({firing})", "none",
             text="Of all gateways.", hidden=("Value",)),
        heading("Availability: 99.5 % of what is not the caller's mistake succeeds (needs the recording rules)"),
        lines("Share of failed requests", "percentunit",
              *((f"job:sekisho_slo_errors:ratio_{span}", f"{{{{job}}}} {span}") for span in ("5m", "1h", "6h", "3d"))),
        lines("Error budget left of 30 days", "percentunit", (f"1 - {spent} / {BUDGET}", "{{job}}"), most=1,
              text="Below 0 the objective is missed."),
    ]  # fmt: skip
    text = "How much is asked, how much fails, and why."
    return dashboard("sekisho-overview", "Overview", text, [source(), INSTANCE, MODEL, TENANT], panels)


def latency() -> JSON:
    added = (0.5, 0.95, 0.99)
    panels = [
        quantiles("Time to first token", TTFT, OF, "Streams: until the first text, reasoning or tool call."),
        heat("Time to first token", "s", TTFT, OF),
        quantiles("Time per output token", TPOT, OF, "Streams: mean time between the tokens after the first."),
        heat("Time per output token", "s", TPOT, OF),
        quantiles("Duration", DURATION, OF, "From head to last byte, of requests that reached an engine."),
        heat("Duration", "s", DURATION, OF),
        quantiles("Wait in the queue", WAIT, OF, "Of requests that had to wait; part of the times above."),
        lines("Time to first token by operation, p95", "s",
              (quantile(0.95, TTFT, "operation", OF), "{{operation}}"), exemplars=True),
        heading("What the gateway adds"),
        *(lines(f"Overhead, {phase}", "s",
                *((quantile(share, OVERHEAD, "", f'{AT},phase="{phase}"'), f"p{share * 100:g}") for share in added),
                text=text)
          for phase, text in (("request", "Before the engine was asked, without waiting for client or queue."),
                              ("response", "After the engine's last byte."))),
    ]  # fmt: skip
    text = "How long callers wait, and for whom."
    return dashboard("sekisho-latency", "Latency", text, [source(), INSTANCE, MODEL], panels)


def tenants() -> JSON:
    tokens, requests, rejected = "sekisho_tokens_total", "sekisho_requests_total", "sekisho_rejected_total"
    kinds = {"prompt": "Prompt", "completion": "Completion", "cached": "Cached prompt"}
    limited = f'{TENANTS},reason=~"rate_limit_exceeded|insufficient_quota|request_too_large_for_limit"'
    cached, prompt = (rate(tokens, "model", f'{BY},kind="{kind}"') for kind in ("cached", "prompt"))
    panels = [
        heading("Tokens"),
        *(lines(f"{name} tokens per second by tenant", "short",
                (rate(tokens, "tenant", f'{BY},kind="{kind}"'), "{{tenant}}"), stacked=True, width=8)
          for kind, name in kinds.items()),
        lines("Tokens per second by model", "short", (rate(tokens, "model, kind", BY), "{{model}} {{kind}}")),
        lines("Share of prompt tokens out of the cache", "percentunit", (f"{cached} / {prompt}", "{{model}}"), most=1,
              text="As engines report it."),
        rows("Tokens in the chosen time", f"sum by (tenant, model, kind) (increase({tokens}{{{BY}}}[$__range]))",
             "short", text="Rounded estimates. Bills are made from the usage records."),
        heading("Limits"),
        lines("Refused by limits, by tenant", "reqps",
              (rate(rejected, "tenant, reason", limited), "{{tenant}} {{reason}}"),
              stacked=True, text="429 before an engine was asked."),
        lines("Share of requests refused by limits", "percentunit",
              (f"{rate(rejected, 'tenant', limited)} / {rate(requests, 'tenant', TENANTS)}", "{{tenant}}"),
              most=1),
        lines("All refusals by tenant", "reqps",
              (rate(rejected, "tenant, reason", TENANTS), "{{tenant}} {{reason}}"), stacked=True),
        lines("Requests by tenant and status", "reqps",
              (rate(requests, "tenant, status", BY), "{{tenant}} {{status}}"), stacked=True),
    ]  # fmt: skip
    text = "Who uses how much of what, and whom limits hold back."
    return dashboard("sekisho-tenants", "Tenants", text, [source(), INSTANCE, MODEL, TENANT], panels)


def fleet() -> JSON:
    each, cuts = "{{model}} {{replica}}", "sekisho_suspected_prompt_cuts_total"
    failures = "sekisho_upstream_failures_total"

    def gauge(title: str, name: str, unit: str = "none", most: float | None = None, text: str = "") -> JSON:
        query = f"max by (model, replica) ({name}{{{OF}}})"
        return lines(title, unit, (query, each), most=most, text=text, width=8)

    own = "The engine's own word."
    panels = [
        heading("Replicas"),
        states("State", f"min by (model, replica, backend) (sekisho_replica_up{{{OF}}})", each, ("away", "up"),
               text="Away: down, loading, drained or paused, for at least one gateway. A full one is up."),
        lines("In flight", "none", (f"sum by (model, replica) (sekisho_inflight_requests{{{OF}}})", each),
              text="Requests that gateways have open there.", width=8),
        gauge("Running", "sekisho_replica_running", text=own),
        gauge("Waiting in the engine", "sekisho_replica_waiting", text=own),
        gauge("KV cache in use", "sekisho_replica_kv_usage_ratio", "percentunit", 1,
              own + " Above 90 % it gets fewer requests."),
        gauge("Found in the prefix cache", "sekisho_replica_prefix_hit_ratio", "percentunit", 1, own),
        lines("Suspected cut prompts", "none",
              (f"sum by (replica) (increase({cuts}{{{AT}}}[$__rate_interval]))", "{{replica}}"), width=8,
              text="Answers for which the engine counted less than half of the prompt: its context may be too small."),
        lines("Failed attempts", "reqps", (rate(failures, "replica, kind", AT), "{{replica}} {{kind}}"), stacked=True),
        lines("Attempts beyond the first", "reqps", (rate("sekisho_retries_total", "instance", AT), "{{instance}}"),
              text="Second attempts after a failure, hedges among them."),
        heading("Queue"),
        lines("Waiting requests", "none", (f"sum by (model) (sekisho_queue_depth{{{OF}}})", "{{model}}"), stacked=True,
              text="Comes and goes; one that stays means that the replicas do not keep up."),
        lines("Wait, of those that waited", "s",
              *((quantile(share, WAIT, "model", OF), f"{{{{model}}}} p{share * 100:g}") for share in (0.5, 0.95))),
        lines("Requests that had to wait", "reqps", (rate(f"{WAIT}_count", "model", OF), "{{model}}")),
        lines("Refused because all are busy", "reqps",
              (rate("sekisho_requests_total", "model, code", f'{OF},code=~"model_busy|no_replica|engine_busy"'),
               "{{model}} {{code}}"), stacked=True),
    ]  # fmt: skip
    text = "What the engines do, and who waits for them."
    return dashboard("sekisho-fleet", "Fleet", text, [source(), INSTANCE, MODEL], panels)


def gateway() -> JSON:
    one = "{{instance}}"

    def plain(title: str, name: str, unit: str = "none", text: str = "") -> JSON:
        return lines(title, unit, (f"{name}{{{AT}}}", one), text=text, width=8)

    def per_second(title: str, name: str, label: str = "", unit: str = "cps", text: str = "") -> JSON:
        by = f"instance, {label}" if label else "instance"
        legend = f"{one} {{{{{label}}}}}" if label else one
        return lines(title, unit, (rate(name, by, AT), legend), text=text, width=8)

    panels = [
        heading("Process"),
        per_second("Processors", "process_cpu_seconds_total", unit="none", text="Busy ones, of all workers together."),
        plain("Memory", "process_resident_memory_bytes", "bytes"),
        plain("Open files", "process_open_fds"),
        plain("Workers", "sekisho_workers", text="Nothing where a gateway is one process."),
        lines("Replaced workers", "none",
              (f"increase(sekisho_worker_restarts_total{{{AT}}}[$__rate_interval])", one), width=8),
        lines("Running for", "s", (f"time() - process_start_time_seconds{{{AT}}}", one), width=8),
        lines("Overhead, p99", "s",
              (quantile(0.99, OVERHEAD, "instance, phase", AT), one + " {{phase}}"), width=8),
        lines("Reloads", "none",
              (f"sum by (instance, result) (increase(sekisho_config_reloads_total{{{AT}}}[$__rate_interval]))",
               one + " {{result}}"), width=8),
        rows("Versions", f"count by (instance, version) (sekisho_build_info{{{AT}}})", "none",
             hidden=("Value",), width=8),
        heading("Database and Redis"),
        states("Database", f"sekisho_database_up{{{AT}}}", one, ("away", "up"), width=12),
        states("Redis", f"sekisho_limit_store_up{{{AT}}}", one, ("away", "up"), width=12),
        plain("Usage records that wait", "sekisho_usage_rows_waiting",
              text="A few are usual; grows while the database is away and falls afterwards."),
        lines("Usage records lost", "none",
              (f"increase(sekisho_usage_rows_dropped_total{{{AT}}}[$__rate_interval])", one), width=8),
        states("Recording of usage", f"1 - sekisho_usage_failing{{{AT}}}", one, ("failing", "works"), width=8),
        per_second("Redis not in time", "sekisho_limit_store_failures_total"),
        heading("Records and certificate"),
        per_second("Spans that got lost", "sekisho_spans_dropped_total", "reason", text="Nothing without tracing."),
        per_second("Records of the content log", "sekisho_content_records_total", "result"),
        lines("Certificate valid for", "s",
              (f"sekisho_certificate_expiry_timestamp_seconds{{{AT}}} - time()", one), width=8,
              text="That of the gateway's port. Nothing without TLS."),
    ]  # fmt: skip
    text = "The gateway itself: processes, stores, records."
    return dashboard("sekisho-gateway", "Gateway", text, [source(), INSTANCE], panels)


def main() -> int:
    stale = []
    for made in (overview(), latency(), tenants(), fleet(), gateway()):
        path = FOLDER / f"{made['uid']}.json"
        written = json.dumps(made, indent=1, ensure_ascii=False) + "\n"
        if "--check" not in sys.argv:
            path.write_text(written)
        elif not path.exists() or path.read_text() != written:
            stale.append(path.name)
    if stale:
        print(f"not what build.py makes: {', '.join(stale)}; run python deploy/grafana/build.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
