"""Trace context by the letter of the standard, who is sampled, and spans out of what was noted."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from backends.base import OpenAICompatible, Operation
from gateway.call import parse_call
from gateway.config import Config, ConfigError, StartupError, load
from gateway.errors import GatewayError, Internal, RateLimited, UpstreamTimeout
from gateway.metrics import Metrics, page
from gateway.outcome import Outcome
from gateway.sse import StreamTap
from gateway.tracing.context import LONGEST_STATE, Parent, passed_on, read_parent, read_state
from gateway.tracing.spans import Spans
from gateway.tracing.trace import Leg, said_by
from gateway.tracing.tracer import Tracer, finished
from gateway.types import Endpoint, Limits, Model, Principal, Replica, Tenant, Timeouts, Usage
from gateway.workers.merged import merge

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01".encode()
REPLICA = Replica(
    "m/vllm-1", "m", OpenAICompatible(kind="vllm"), Endpoint("10.1.2.3", 8000), "", "org/engine-7b", Timeouts(), {}
)
MODEL = Model("m", (), "least_load", (), (), (REPLICA,), 512, 0)
CALLER = Principal(Tenant("research"), "ci", "user", ("*",), None, Limits())


# --- the grammar
@pytest.mark.parametrize(
    "value",
    [
        PARENT,
        b" " + PARENT + b"\t",
        PARENT[:-2] + b"00",
        PARENT[:-2] + b"ff",
        b"01" + PARENT[2:],
        b"cc" + PARENT[2:] + b"-what-comes-later",
        b"cc" + PARENT[2:] + b"-",
    ],
)
def test_a_valid_parent_is_read(value: bytes) -> None:
    flags = int(value.strip()[53:55], 16)
    assert read_parent({b"traceparent": value}) == Parent(TRACE, SPAN, flags)
    assert passed_on({b"traceparent": value}) == b"traceparent: %b\r\n" % value.strip()


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"00",
        PARENT + b"-",
        PARENT + b"-more",
        PARENT + b"\n",
        PARENT[:-1],
        PARENT.upper(),
        b"ff" + PARENT[2:],
        PARENT[1:],
        b"cc" + PARENT[2:] + b"more",
        b"cc" + PARENT[2:] + b"-more\r\nx-evil: 1",
        b"cc" + PARENT[2:] + b"-" + b"x" * 300,
        b"00-" + b"0" * 32 + PARENT[35:],
        PARENT[:36] + b"0" * 16 + PARENT[52:],
        PARENT.replace(b"-", b"_"),
        PARENT + b"," + PARENT,
        PARENT[:-2] + "é".encode("latin-1") * 2,
    ],
)
def test_anything_else_counts_as_not_sent(value: bytes) -> None:
    headers = {b"traceparent": value, b"tracestate": b"a=1"}
    assert read_parent(headers) is None
    assert passed_on(headers) == b""


@given(st.binary(max_size=80))
@settings(max_examples=300, deadline=None)
def test_no_bytes_get_through_that_are_no_header(noise: bytes) -> None:
    for value in (noise, PARENT + noise, noise + PARENT, b"cc" + PARENT[2:] + b"-" + noise):
        lines = passed_on({b"traceparent": value, b"tracestate": noise})
        assert lines.count(b"\r\n") <= 2 and b"\n" not in lines.replace(b"\r\n", b"")
        assert lines.isascii()


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (b"rojo=00f067aa0ba902b7", b"rojo=00f067aa0ba902b7"),
        (b"a=1,b=2", b"a=1,b=2"),
        (b" a=1 ,\tb=2,, ", b"a=1,b=2"),
        (b"fw529a3039@dt=x y", b"fw529a3039@dt=x y"),
        (b"1st_key-*/=~!", b"1st_key-*/=~!"),
        (b"", b""),
        (b",,", b""),
        (b"a", b""),
        (b"A=1", b""),
        (b"a=", b""),
        (b"a=b=c", b""),
        (b"a=1\r\nx-evil: 1", b""),
        (b"a=\xe9", b""),
        (b"a=1,b", b""),
        (b",".join(b"k%d=v" % number for number in range(32)), b",".join(b"k%d=v" % number for number in range(32))),
        (b",".join(b"k%d=v" % number for number in range(33)), b""),
        (b"a=" + b"v" * 256, b"a=" + b"v" * 256),
        (b"a=" + b"v" * 257, b""),
        (b",".join(b"k%d=%b" % (number, b"v" * 255) for number in range(32)) + b" " * LONGEST_STATE, b""),
    ],
)
def test_the_state_is_passed_on_only_if_it_is_one(value: bytes, read: bytes) -> None:
    assert read_state({b"tracestate": value}) == read
    lines = passed_on({b"traceparent": PARENT, b"tracestate": value})
    assert lines == b"traceparent: %b\r\n" % PARENT + (b"tracestate: %b\r\n" % read if read else b"")


# --- who is sampled
def tracer(sample: float = 1.0) -> Tracer:
    found = Tracer("1.2.3")
    found.adopt(Config.model_validate({"tracing": {"sample": sample}}))
    return found


@pytest.mark.parametrize(("flags", "sampled"), [("01", True), ("00", False), ("03", True), ("02", False)])
@pytest.mark.parametrize("sample", [0.0, 1.0])
def test_whoever_began_a_trace_decides(flags: str, sampled: bool, sample: float) -> None:
    headers = {b"traceparent": PARENT[:-2] + flags.encode(), b"tracestate": b"a=1"}
    trace = tracer(sample).begin(headers)
    assert (trace.trace_id, trace.parent_id, trace.sampled, trace.state) == (TRACE, SPAN, sampled, b"a=1")
    leg = trace.begin(parse_call(Operation.CHAT, b'{"model":"m","messages":[{}]}'), REPLICA)
    assert leg.headers == f"traceparent: 00-{TRACE}-{leg.span_id}-{flags}\r\ntracestate: a=1\r\n".encode()
    assert bool(trace.legs) is sampled


def test_a_trace_that_begins_here_has_ids_of_its_own_and_no_foreign_state() -> None:
    traces = [tracer().begin({b"traceparent": b"nonsense", b"tracestate": b"a=1"}) for _ in range(100)]
    assert len({trace.trace_id for trace in traces}) == len({trace.span_id for trace in traces}) == 100
    assert all(len(trace.trace_id) == 32 and len(trace.span_id) == 16 for trace in traces)
    assert not any(trace.parent_id or trace.state for trace in traces)


@pytest.mark.parametrize("sample", [0.0, 0.01, 0.5, 1.0])
def test_the_share_is_taken_as_other_services_take_it(sample: float) -> None:
    """By the trace's id: services with the same share record the same traces."""
    ours, theirs = tracer(sample), TraceIdRatioBased(sample)
    for _ in range(500):
        trace = ours.begin({})
        decision = theirs.should_sample(None, int(trace.trace_id, 16), "").decision
        assert trace.sampled is (decision is Decision.RECORD_AND_SAMPLE)


# --- spans
def spans(outcome: Outcome) -> list[ReadableSpan]:
    assert outcome.trace is not None
    made = Spans("sekisho", "1.2.3", "http", {"chat": "/v1/chat/completions", "embeddings": "/v1/embeddings"})
    return list(made.of(finished(outcome, outcome.trace), 1000.0))


def asked(body: bytes = b'{"model":"m","messages":[{}]}', **more: Any) -> Outcome:
    """A request that one engine has answered."""
    outcome = Outcome("chat", "req_1", 100.0)
    outcome.trace = tracer().begin({b"traceparent": PARENT})
    outcome.principal, outcome.model, outcome.replica, outcome.asked = CALLER, MODEL, REPLICA, "alias"
    outcome.status, outcome.attempts, outcome.usage = 200, 1, Usage(10, 11, 4, 3)
    outcome.sent, outcome.first_token, outcome.ended = 100.01, 100.21, 101.26
    leg = outcome.trace.begin(parse_call(Operation.CHAT, body), REPLICA)
    leg.end(outcome, 200, None, None)
    for name, value in more.items():
        setattr(outcome, name, value)
    return outcome


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_the_server_span() -> None:
    server, client = spans(asked(queued=0.25))
    assert (server.name, server.kind) == ("POST /v1/chat/completions", SpanKind.SERVER)
    assert server.context is not None and server.parent is not None and client.parent is not None
    assert f"{server.context.trace_id:032x}" == TRACE and f"{server.parent.span_id:016x}" == SPAN
    assert server.parent.is_remote and client.parent.span_id == server.context.span_id
    assert server.start_time == 1_100_000_000_000 and server.status.status_code is StatusCode.UNSET
    found = attributes(server)
    assert found.pop("sekisho.time_to_first_token") == pytest.approx(0.21)
    assert found == {
        "http.request.method": "POST", "http.route": "/v1/chat/completions", "url.path": "/v1/chat/completions",
        "url.scheme": "http", "http.response.status_code": 200, "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m", "sekisho.request_id": "req_1", "sekisho.status": 200,
        "sekisho.tenant": "research", "sekisho.key": "ci", "sekisho.replica": "m/vllm-1", "sekisho.attempts": 1,
        "sekisho.usage_source": "engine", "sekisho.queue_wait": 0.25,
    }  # fmt: skip


def test_the_client_span() -> None:
    body = (
        b'{"model":"m","messages":[{"role":"user","content":"secret"}],"temperature":1,"top_p":0.5,"max_tokens":7,'
        b'"seed":3,"n":2,"stop":["secret"],"user":"secret","presence_penalty":0.1,"reasoning_effort":"low"}'
    )
    _, client = spans(asked(body, stream=True))
    assert (client.name, client.kind) == ("chat org/engine-7b", SpanKind.CLIENT)
    found = attributes(client)
    assert found.pop("gen_ai.response.time_to_first_chunk") == pytest.approx(0.2)
    assert found == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm", "gen_ai.request.model": "org/engine-7b",
        "gen_ai.request.stream": True, "http.request.method": "POST", "http.response.status_code": 200,
        "sekisho.replica": "m/vllm-1", "gen_ai.usage.input_tokens": 10, "gen_ai.usage.output_tokens": 11,
        "gen_ai.usage.cache_read.input_tokens": 4, "gen_ai.usage.reasoning.output_tokens": 3,
        "gen_ai.request.temperature": 1.0, "gen_ai.request.top_p": 0.5, "gen_ai.request.max_tokens": 7,
        "gen_ai.request.seed": 3, "gen_ai.request.choice.count": 2, "gen_ai.request.presence_penalty": 0.1,
        "gen_ai.request.reasoning.level": "low",
    }  # fmt: skip
    [event] = client.events
    assert event.name == "sekisho.first_token" and event.timestamp == pytest.approx(1_100_210_000_000)


def test_nothing_that_was_written_and_no_address_is_in_a_span() -> None:
    body = (
        b'{"model":"m","messages":[{"role":"user","content":"secret"}],"stop":"secret","user":"secret",'
        b'"metadata":{"a":"secret"},"tools":[{"secret":1}],"reasoning_effort":"secret that is longer than any option"}'
    )
    message = encode_spans(spans(asked(body, asked="secret"))).SerializeToString()
    assert b"secret" not in message and b"10.1.2.3" not in message


@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1, 1 << 63 - 1])
def test_numbers_that_the_protocol_cannot_carry_lose_no_spans(number: int) -> None:
    outcome = asked()
    assert outcome.trace is not None
    outcome.trace.parameters = {"seed": number, "n": number, "temperature": number, "max_tokens": True, "top_p": "1"}
    _, client = spans(outcome)
    assert encode_spans([client]).SerializeToString()
    assert not {"gen_ai.request.max_tokens", "gen_ai.request.top_p"} & attributes(client).keys()


@pytest.mark.parametrize(
    ("error", "begun", "sent", "failed"),
    [
        (RateLimited("x"), False, 429, False),
        (Internal(), False, 500, True),
        (UpstreamTimeout("x"), False, 504, True),
        (UpstreamTimeout("x"), True, 200, True),
    ],
)
def test_a_callers_mistake_is_no_failure_of_the_server(
    error: GatewayError, begun: bool, sent: int, failed: bool
) -> None:
    server, *_ = spans(asked(error=error, status=error.status, begun=begun))
    found = attributes(server)
    assert (server.status.status_code is StatusCode.ERROR) is failed
    assert found.get("error.type") == (error.code if failed else None)
    assert found["http.response.status_code"] == sent
    assert (found["sekisho.status"], found["sekisho.error"]) == (error.status, error.code)


def test_an_attempt_keeps_the_name_of_its_error_and_nothing_else() -> None:
    trace = tracer().begin({})
    for error, code in ((UpstreamTimeout("x"), "engine_timeout"), (ValueError("secret"), "internal_error")):
        leg = Leg(trace, REPLICA)
        leg.end(Outcome("chat", "r", 0.0), 0, None, error)
        assert leg.code == code and not leg.cancelled
        assert error not in vars(leg).values()
    leg.code = ""
    leg.end(Outcome("chat", "r", 0.0), 0, None, asyncio.CancelledError())
    assert leg.cancelled and not leg.code


def test_what_a_stream_says_of_itself() -> None:
    tap = StreamTap("asked", strip_usage=True)
    first = b'{"id":"c-1","model":"engine","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}'
    other = b'{"id":"c-1","model":"engine","choices":[{"index":1,"delta":{"content":"a"},"finish_reason":"length"}]}'
    tap.feed(b"data: " + first + b"\n\ndata: " + other + b"\n\n")
    leg = Leg(tracer().begin({}), REPLICA)
    leg.end(Outcome("chat", "r", 0.0), 200, tap, None)
    assert leg.said == ("c-1", "engine", ("error", "length"))


def test_what_a_document_says_of_itself_is_taken_only_if_it_is_of_the_usual_kind() -> None:
    choices = [{"finish_reason": "stop"}, {"finish_reason": None}, 3]
    assert said_by({"id": "c-1", "model": "engine", "choices": choices}) == ("c-1", "engine", ("stop", "error"))
    assert said_by({"id": 1, "model": "x" * 300, "choices": {"a": 1}}) == (None, None, ())


# --- on and off
def test_nothing_of_opentelemetry_is_imported_while_it_is_off() -> None:
    script = (
        "import sys, gateway.worker; from gateway.config import Config; from gateway.tracing.tracer import Tracer;"
        "t = Tracer('1'); t.adopt(Config.model_validate({'models': []}));"
        "kept = 'opentelemetry.sdk', 'opentelemetry.exporter';"
        "print(t.on, [name for name in sys.modules if name.startswith(kept)])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "False []"


def test_an_endpoint_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    found = Tracer("1")
    with pytest.raises(StartupError, match=r"sekisho\[otel\]"):
        found.adopt(Config.model_validate({"tracing": {"endpoint": "http://127.0.0.1:1/v1/traces"}}))
    assert not found.on and found.followed(Config.model_validate({})) is None


@pytest.mark.parametrize(
    ("tracing", "said"),
    [
        ({"endpoint": "http://user:secret@127.0.0.1:4318/v1/traces"}, "credentials in the URL"),
        ({"endpoint": "127.0.0.1:4318"}, "not a usable URL"),
        ({"endpoint": "ftp://127.0.0.1:4318/v1/traces"}, "not a usable URL"),
        ({"endpoint": "http://collector:4318"}, "without a path"),
        ({"headers": {"bad name": "x"}}, "not a header name"),
        ({"headers": {"x": "secret\r\ny: z"}}, "a header cannot carry"),
        ({"headers": {"x": ""}}, "a header cannot carry"),
        ({"sample": 1.5}, "sample"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, tracing: dict[str, Any], said: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(json.dumps({"tracing": tracing}))
    with pytest.raises(ConfigError) as caught:
        load(file, kinds=("vllm",))
    assert said in str(caught.value) and "secret" not in str(caught.value)


def test_a_collector_in_the_cluster_and_a_bearer_token_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    headers = {"authorization": "Bearer a.b-c", "x-tenant": "two words"}
    file.write_text(json.dumps({"tracing": {"endpoint": "http://otel-collector:4318/v1/traces", "headers": headers}}))
    found = load(file, kinds=("vllm",)).tracing
    assert {name: value.get_secret_value() for name, value in found.headers.items()} == headers
    assert "a.b-c" not in repr(found)


class Held:
    """Stands in for the exporter's `export`: it works once it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self.going_on, self.entered = threading.Event(), threading.Event()
        self.sizes: list[int] = []
        monkeypatch.setattr(OTLPSpanExporter, "export", lambda _, batch: self._export(batch))

    def _export(self, batch: Any) -> SpanExportResult:
        self.entered.set()
        assert self.going_on.wait(60)
        self.sizes.append(len(list(batch)))
        return SpanExportResult.FAILURE


def sending() -> Tracer:
    found = Tracer("1")
    found.adopt(Config.model_validate({"tracing": {"endpoint": "http://127.0.0.1:1/v1/traces"}}))
    return found


def test_a_full_queue_drops_what_comes_and_counts_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread is held in the middle of a message; what is dropped afterwards is known to the last span."""
    monkeypatch.setattr("gateway.tracing.sender.MOST_WAITING", 10)
    exporter, found = Held(monkeypatch), sending()
    with caplog.at_level(logging.INFO, "sekisho"):
        found.add([asked()])
        assert exporter.entered.wait(30)
        for _ in range(20):
            found.add([asked()])
        assert found.lost["queue_full"] == 2 * (21 - 11)
        exporter.going_on.set()
        found.close()
    assert found.lost["not_sent"] == sum(exporter.sizes) == 2 * 11
    assert len([record for record in caplog.records if "spans are lost" in record.message]) == 1


def test_the_end_does_not_wait_for_a_message_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` returns while the message is still held, and nothing is sent after it."""
    monkeypatch.setattr("gateway.tracing.sender.MOST_AT_ONCE", 1)
    exporter, found = Held(monkeypatch), sending()
    for _ in range(5):
        found.add([asked()])
    assert exporter.entered.wait(30)
    found.close()
    assert not exporter.sizes
    exporter.going_on.set()
    for thread in threading.enumerate():
        if thread.name == "spans":
            thread.join(30)
    assert exporter.sizes == [2]


def test_a_reload_lets_the_old_thread_end_once_it_has_sent_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, found = Held(monkeypatch), sending()
    [thread] = [thread for thread in threading.enumerate() if thread.name == "spans"]
    found.add([asked()])
    assert exporter.entered.wait(30)
    found.add([asked()])
    found.adopt(Config.model_validate({}))
    assert not found.on
    exporter.going_on.set()
    thread.join(30)
    assert not thread.is_alive() and exporter.sizes == [2, 2]


def test_a_large_backlog_goes_out_in_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.tracing.sender.MOST_AT_ONCE", 4)
    exporter, found = Held(monkeypatch), sending()
    found.add([asked()])
    assert exporter.entered.wait(30)
    for size in (3, 3, 9, 1):
        found.add([asked() for _ in range(size)])
    exporter.going_on.set()
    found.close()
    assert sum(exporter.sizes) == 2 * 17 and max(exporter.sizes) <= 2 * 4


# --- exemplars
def booked(*outcomes: Outcome) -> Metrics:
    metrics = Metrics("1")
    for outcome in outcomes:
        outcome.upstream_ended = outcome.ended - 0.05
        metrics.record(outcome)
    return metrics


def exemplars(metrics: Metrics) -> dict[tuple[str, str], tuple[dict[str, str], float]]:
    """(sample, bucket) -> (labels, value)."""
    text, kind = page(metrics.collect(), "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    return {
        (sample.name, sample.labels["le"]): (sample.exemplar.labels, sample.exemplar.value)
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.exemplar is not None
    }


def test_each_bucket_remembers_the_latest_trace_that_is_recorded() -> None:
    first, latest, slow, unrecorded, off = asked(), asked(), asked(ended=140.0), asked(), asked(trace=None)
    for number, outcome in enumerate((first, latest, slow, unrecorded)):
        assert outcome.trace is not None
        outcome.trace.trace_id = f"{number:032x}"
    assert unrecorded.trace is not None
    unrecorded.trace.flags = 0
    found = exemplars(booked(first, latest, slow, unrecorded, off))
    name = "sekisho_request_duration_seconds_bucket"
    assert found[name, "2.5"] == ({"trace_id": f"{1:032x}"}, pytest.approx(1.26))
    assert found[name, "60.0"] == ({"trace_id": f"{2:032x}"}, pytest.approx(40.0))
    name = "sekisho_time_to_first_token_seconds_bucket"
    assert found[name, "0.25"] == ({"trace_id": f"{2:032x}"}, pytest.approx(0.21))
    names = "request_duration", "time_to_first_token", "time_per_output_token"
    assert {sample for sample, _ in found} == {f"sekisho_{name}_seconds_bucket" for name in names}


def test_exemplars_survive_the_way_between_processes_and_change_no_count() -> None:
    families = pickle.loads(pickle.dumps(booked(asked()).collect()))
    with_trace, _ = page(merge([families, booked(asked(trace=None)).collect()]), "application/openmetrics-text")
    assert with_trace.count(b'# {trace_id="') == 3
    plain, without = (page(booked(outcome).collect())[0].split(b"\n") for outcome in (asked(), asked(trace=None)))
    ours = [line for line in plain if line.startswith(b"sekisho_")]
    assert ours and ours == [line for line in without if line.startswith(b"sekisho_")]
    assert not any(b"trace_id" in line for line in ours)


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("application/openmetrics-text", True),
        ("Application/OpenMetrics-Text;version=1.0.0;q=0.5, text/plain;q=0.3, */*;q=0.1", True),
        ("application/vnd.google.protobuf;q=0.6,application/openmetrics-text;version=0.0.1;q=0.4,*/*;q=0.1", True),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text; q=0.000, text/plain", False),
        ("application/openmetrics-textual", False),
        (",;,", False),
    ],
)
def test_the_format_is_the_scrapers_choice(accept: str, openmetrics: bool) -> None:
    text, kind = page(booked().collect(), accept)
    assert kind.startswith("application/openmetrics-text") is openmetrics
    assert text.endswith(b"# EOF\n") is openmetrics
