"""Traces as a collector sees them: one tree per request, and a gateway that does not mind what becomes of it."""

from __future__ import annotations

import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.doubles.collector import Collector, Message, Traced
from tests.doubles.engine import Engine, Exchange
from tests.e2e.harness import Gateway, Lab, base_config, chat, eventually, free_port, replica

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"traceparent: 00-{TRACE}-{SPAN}-01"
LOST = "spans are lost"


@pytest.fixture(scope="module")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway of this file's own: hedging uses up the budget for retries that others need."""
    gateway = Gateway(tmp_path_factory.mktemp("tracing"), base_config({}, []))
    yield gateway
    gateway.stop()
    assert "Traceback" not in gateway.log(), gateway.log()[-5000:]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


def tree(collector: Collector, spans: int = 2, trace_id: str | None = None) -> tuple[Traced, list[Traced]]:
    """The one trace there is: the server span, and the client spans in the order in which they began."""

    def found() -> list[Traced]:
        every = [span for span in collector.spans() if trace_id in (None, span.trace_id)]
        return every if len(every) >= spans else []

    every = eventually(found)
    assert len(every) == spans, [span.name for span in collector.spans()]
    assert len({span.trace_id for span in every}) == 1 and len({span.span_id for span in every}) == spans
    [server] = [span for span in every if span.kind == "SERVER"]
    clients = sorted((span for span in every if span.kind == "CLIENT"), key=lambda span: span.begun)
    assert len(clients) == spans - 1
    for client in clients:
        assert client.parent_id == server.span_id
        assert server.begun <= client.begun <= client.ended <= server.ended
    return server, clients


def told(engine: Engine) -> list[str]:
    """What the engine was told of its place in a trace, last request: version, trace, parent, flags."""
    [value] = engine.last().values("traceparent")
    return value.split("-")


def pair(lab: Lab, collector: Collector, first: Any, second: Any = None, **sections: Any) -> tuple[Engine, Engine]:
    """Two replicas of which a request takes the first, unless it is given a second one."""
    one, other = lab.engine(script=first), lab.engine(script=second)
    replicas = [replica(one, weight=1000), replica(other, weight=0.001)]
    lab.serve({"m": {"replicas": replicas}}, tracing={"endpoint": collector.url}, **sections)
    return one, other


def one(lab: Lab, collector: Collector, script: Any = None, **more: Any) -> Engine:
    engine = lab.engine(script=script)
    lab.serve({"m": [replica(engine)]}, tracing={"endpoint": collector.url, **more})
    return engine


# --- the tree
def test_an_answer(lab: Lab, collector: Collector) -> None:
    engine = one(lab, collector, service_name="front door", headers={"authorization": "Bearer of a token"})
    answer = lab.chat(temperature=0.5, max_tokens=5, n=1)
    server, [client] = tree(collector)
    assert server.parent_id == "" and told(engine) == ["00", server.trace_id, client.span_id, "01"]
    assert (server.name, client.name) == ("POST /v1/chat/completions", "chat org/Engine-Model-7B")
    assert (server.status, client.status) == ("UNSET", "UNSET")
    assert server.resource["service.name"] == "front door" and server.resource["service.version"]
    found = server.attributes
    assert found["http.request.method"] == "POST" and found["http.route"] == "/v1/chat/completions"
    assert found["http.response.status_code"] == found["sekisho.status"] == 200
    assert (found["sekisho.tenant"], found["sekisho.key"]) == (lab.tenant, "test")
    assert found["sekisho.request_id"] == answer.header("x-request-id")
    assert not any(name.startswith("gen_ai.usage") for name in found), "tokens would be counted twice"
    found = client.attributes
    assert (found["gen_ai.operation.name"], found["gen_ai.provider.name"]) == ("chat", "vllm")
    assert (found["gen_ai.request.model"], found["gen_ai.response.model"]) == ("org/Engine-Model-7B",) * 2
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (11, 5)
    assert found["gen_ai.response.finish_reasons"] == ["stop"] and found["gen_ai.response.id"] == "chatcmpl-7f3a"
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.max_tokens"]) == (0.5, 5)
    assert found["sekisho.replica"] == server.attributes["sekisho.replica"]
    line = lab.gateway.access_line(answer.header("x-request-id") or "")
    assert line["trace_id"] == server.trace_id
    [message] = collector.messages
    assert message.headers["authorization"] == "Bearer of a token" and message.path == "/v1/traces"


def test_a_stream(lab: Lab, collector: Collector) -> None:
    one(lab, collector)
    assert lab.stream().ended_well()
    server, [client] = tree(collector)
    assert client.attributes["gen_ai.request.stream"] is True
    assert client.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert client.attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert server.attributes["sekisho.time_to_first_token"] > 0
    assert client.events == ["sekisho.first_token"] and client.attributes["gen_ai.usage.output_tokens"] == 5


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/embeddings", {"model": "m", "input": "Say hello.", "encoding_format": "float"}, "embeddings"),
        ("/v1/completions", {"model": "m", "prompt": "Say hello."}, "text_completion"),
    ],
)
def test_other_operations(lab: Lab, collector: Collector, path: str, body: dict[str, Any], operation: str) -> None:
    one(lab, collector)
    assert lab.call(body, path).status == 200
    server, [client] = tree(collector)
    assert server.name == f"POST {path}" and client.name.startswith(f"{operation} ")
    assert client.attributes["gen_ai.operation.name"] == operation
    assert client.attributes["gen_ai.usage.input_tokens"] > 0


def test_nothing_that_was_written_no_key_and_no_address_gets_to_the_collector(lab: Lab, collector: Collector) -> None:
    def answers(x: Exchange) -> None:
        x.reply(x.dialect.completion("the-answer"))

    engine = one(lab, collector, answers)
    wanted = {"messages": [{"role": "user", "content": "the-prompt"}], "user": "the-user", "stop": ["the-stop"]}
    assert lab.call({"model": "m", "metadata": {"a": "the-metadata"}} | wanted).status == 200
    lab.chat("the-wrong-model")
    lab.call(chat(), key="sk-the-wrong-key")
    assert eventually(lambda: len(collector.spans()) >= 4)
    sent = b"".join(message.body for message in collector.messages)
    assert b"the-" not in sent and lab.key.encode() not in sent and f":{engine.port}".encode() not in sent
    assert b"127.0.0.1" not in sent


# --- whose trace it is
def test_a_client_that_brings_a_trace(lab: Lab, collector: Collector) -> None:
    engine = one(lab, collector, sample=0)
    answer = lab.call(chat(), headers=[PARENT, "tracestate: vendor=x,other=y"])
    server, [client] = tree(collector)
    assert (server.trace_id, server.parent_id) == (TRACE, SPAN)
    assert server.state == client.state == "vendor=x,other=y"
    assert told(engine) == ["00", TRACE, client.span_id, "01"]
    assert engine.last().values("tracestate") == ["vendor=x,other=y"]
    assert lab.gateway.access_line(answer.header("x-request-id") or "")["trace_id"] == TRACE


def test_a_trace_that_its_beginner_does_not_record(lab: Lab, collector: Collector) -> None:
    engine = one(lab, collector)
    lab.call(chat(), headers=[PARENT[:-2] + "00"])
    assert told(engine)[1] == TRACE and told(engine)[3] == "00" and told(engine)[2] != SPAN
    lab.chat()
    server, _ = tree(collector)
    assert server.trace_id != TRACE


@pytest.mark.parametrize("value", ["00-1-2-01", PARENT[13:] + "-more", f"ff{PARENT[15:]}", PARENT[13:].upper()])
def test_a_parent_that_is_none_begins_a_new_trace(lab: Lab, collector: Collector, value: str) -> None:
    engine = one(lab, collector)
    lab.call(chat(), headers=[f"traceparent: {value}", "tracestate: vendor=x"])
    server, [client] = tree(collector)
    assert server.parent_id == "" and told(engine) == ["00", server.trace_id, client.span_id, "01"]
    assert not engine.last().values("tracestate")


def test_while_tracing_is_off_only_valid_context_passes_and_lines_have_no_trace(lab: Lab) -> None:
    engine = lab.one()
    answer = lab.call(chat(), headers=[PARENT, "tracestate: vendor=x"])
    assert engine.last().values("traceparent") == [PARENT[13:]] and engine.last().values("tracestate") == ["vendor=x"]
    assert "trace_id" not in lab.gateway.access_line(answer.header("x-request-id") or "")
    lab.call(chat(), headers=[PARENT, "tracestate: no state"])
    assert engine.last().values("traceparent") == [PARENT[13:]] and not engine.last().values("tracestate")
    lab.call(chat(), headers=["traceparent: nonsense", "tracestate: vendor=x"])
    assert not engine.last().values("traceparent") and not engine.last().values("tracestate")
    lab.chat()
    assert not engine.last().values("traceparent")


# --- several attempts
def test_a_second_replica_after_a_failure(lab: Lab, collector: Collector) -> None:
    first, second = pair(lab, collector, lambda x: x.fail("out of memory", 500))
    assert lab.chat().status == 200
    server, [failed, client] = tree(collector, 3)
    assert (failed.status, failed.attributes["error.type"]) == ("ERROR", "engine_error")
    assert failed.attributes["http.response.status_code"] == 500
    assert "http.request.resend_count" not in failed.attributes
    assert client.status == server.status == "UNSET" and client.attributes["http.request.resend_count"] == 1
    assert failed.attributes["sekisho.replica"] != client.attributes["sekisho.replica"]
    assert failed.ended <= client.begun and server.attributes["sekisho.attempts"] == 2
    assert told(first)[2] == failed.span_id and told(second)[2] == client.span_id


def test_an_engine_that_ends_the_connection(lab: Lab, collector: Collector) -> None:
    one(lab, collector, lambda x: x.reset())
    assert lab.chat().status == 502
    server, [client] = tree(collector)
    assert server.status == client.status == "ERROR"
    assert server.attributes["error.type"] == client.attributes["error.type"] == "engine_connection_lost"
    assert "http.response.status_code" not in client.attributes


def test_hedging(lab: Lab, collector: Collector) -> None:
    routing = {"hedge_after": "150ms", "retry_budget": 1}
    slow, quick = pair(lab, collector, lambda x: x.wait(), routing=routing)
    assert lab.stream().ended_well()
    server, [loser, winner] = tree(collector, 3)
    assert loser.attributes["sekisho.cancelled"] is True and loser.status == "UNSET"
    assert "sekisho.cancelled" not in winner.attributes and winner.attributes["gen_ai.usage.output_tokens"] == 5
    assert winner.begun < loser.ended, "both run at the same time"
    assert server.attributes["sekisho.replica"] == winner.attributes["sekisho.replica"]
    assert told(slow)[2] == loser.span_id and told(quick)[2] == winner.span_id
    assert "gen_ai.response.finish_reasons" not in loser.attributes


def test_a_fallback(lab: Lab, collector: Collector) -> None:
    broken, other = lab.engine(script=lambda x: x.fail("no", 500)), lab.engine()
    models = {"m": {"replicas": [replica(broken)], "fallbacks": ["spare"]}, "spare": [replica(other)]}
    lab.serve(models, tracing={"endpoint": collector.url})
    assert lab.chat().status == 200
    server, [failed, client] = tree(collector, 3)
    assert failed.attributes["sekisho.replica"].startswith("m/") and failed.status == "ERROR"
    assert client.attributes["sekisho.replica"].startswith("spare/") and client.status == "UNSET"
    assert server.attributes["gen_ai.request.model"] == "m"


def test_a_wait_in_the_queue(lab: Lab, collector: Collector) -> None:
    release = threading.Event()
    engine = lab.engine()
    engine.once(lambda x: (x.wait(release), x.reply(x.dialect.completion("a"))))
    model = {"replicas": [replica(engine, max_inflight=1)], "queue": {"max_waiting": 4, "max_wait": "20s"}}
    lab.serve({"m": model}, tracing={"endpoint": collector.url})
    first = threading.Thread(target=lab.chat)
    first.start()
    assert eventually(lambda: engine.running == 1)
    second = threading.Thread(target=lab.call, args=(chat(),), kwargs={"headers": [PARENT]})
    second.start()
    assert eventually(lambda: lab.gateway.metric("sekisho_queue_depth") == 1)
    release.set()
    first.join(20)
    second.join(20)
    server, [client] = tree(collector, 2, TRACE)
    waited = server.attributes["sekisho.queue_wait"]
    assert waited > 0 and client.begun - server.begun >= waited * 1e9


# --- errors
@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"key": "sk-nobody"}, 401, "invalid_api_key"),
        ({"body": chat("none")}, 404, "model_not_found"),
    ],
)
def test_who_is_refused_leaves_a_span_and_the_server_has_not_failed(
    lab: Lab, collector: Collector, options: dict[str, Any], status: int, code: str
) -> None:
    one(lab, collector)
    assert lab.call(options.pop("body", chat()), **options).status == status
    server, _ = tree(collector, 1)
    assert server.status == "UNSET" and "error.type" not in server.attributes
    assert server.attributes["http.response.status_code"] == status
    assert server.attributes["sekisho.error"] == code
    assert "gen_ai.request.model" not in server.attributes


def test_an_engine_that_refuses_what_the_caller_asked(lab: Lab, collector: Collector) -> None:
    one(lab, collector, lambda x: x.fail("bad value", 400))
    assert lab.chat().status == 400
    server, [client] = tree(collector)
    assert server.status == "UNSET" and client.status == "ERROR"
    assert client.attributes["error.type"] == "invalid_value"


def test_a_stream_that_breaks(lab: Lab, collector: Collector) -> None:
    def breaks(x: Exchange) -> None:
        x.begin()
        x.delta("a")
        x.delta("b")
        x.reset()

    one(lab, collector, breaks)
    assert lab.stream().stream_errors()
    server, [client] = tree(collector)
    assert server.status == client.status == "ERROR"
    assert server.attributes["http.response.status_code"] == 200 and server.attributes["sekisho.status"] == 502
    assert server.attributes["error.type"] == client.attributes["error.type"] == "engine_connection_lost"
    assert client.attributes["gen_ai.response.finish_reasons"] == ["error"]
    assert client.attributes["gen_ai.usage.output_tokens"] == 2


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves(lab: Lab, collector: Collector, begun: bool) -> None:
    def waits(x: Exchange) -> None:
        if begun:
            x.begin()
            x.delta("a")
        x.wait()

    engine = one(lab, collector, waits)
    with lab.gateway.wire() as wire:
        if begun:
            wire.ask("POST", "/v1/chat/completions", chat(stream=True), key=lab.key).until(1)
        else:
            from tests.e2e.wire import request

            wire.send(request("POST", "/v1/chat/completions", chat(), key=lab.key))
            assert eventually(lambda: engine.running == 1)
    server, [client] = tree(collector)
    assert server.status == "ERROR" and server.attributes["error.type"] == "client_closed_request"
    assert server.attributes.get("http.response.status_code") == (200 if begun else None)
    assert client.status == "UNSET" and client.attributes["sekisho.cancelled"] is True


# --- collectors that fail
def own(start: Callable[..., Gateway], engine: Engine, endpoint: str, **tracing: Any) -> Gateway:
    lab_config = {"auth": {"required": False}, "tracing": {"endpoint": endpoint, **tracing}}
    return start(base_config({"m": [replica(engine)]}, [], **lab_config))


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def asks(gateway: Gateway, times: int = 1) -> None:
    for _ in range(times):
        assert gateway.http.post("/v1/chat/completions", json=chat()).status_code == 200


@pytest.mark.parametrize("how", ["away", "error", "wrong", "hangs"])
def test_a_collector_that_fails_costs_spans_and_one_line(
    start: Callable[..., Gateway], lab: Lab, collector: Collector, how: str
) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1/traces" if how == "away" else collector.url
    answers = {"error": 500, "wrong": 400}
    collector.script = Message.hang if how == "hangs" else lambda x: x.answer(answers[how])
    gateway = own(start, lab.engine(), url)
    asks(gateway, 3)
    assert eventually(lambda: gateway.metric("sekisho_spans_dropped_total", reason="not_sent") >= 2)
    asks(gateway, 3)
    assert eventually(lambda: gateway.metric("sekisho_spans_dropped_total", reason="not_sent") == 12)
    lines = [line for line in gateway.log().splitlines() if LOST in line]
    assert len(lines) == 1 and ("answers 500" in lines[0]) is (how == "error")
    assert f":{urlsplit(url).port}" not in gateway.log(), "no address of the collector"
    gateway.terminate()
    assert gateway.wait() == 0 and "Traceback" not in gateway.log()


def test_a_stop_in_the_middle_of_a_message_that_hangs(
    start: Callable[..., Gateway], lab: Lab, collector: Collector
) -> None:
    collector.script = Message.hang
    gateway = own(start, lab.engine(), collector.url)
    asks(gateway)
    assert eventually(lambda: collector.seen == 1)
    gateway.terminate()
    assert gateway.wait() == 0 and "Traceback" not in gateway.log()


def test_a_collector_that_comes_back(start: Callable[..., Gateway], lab: Lab, collector: Collector) -> None:
    collector.script = lambda x: x.answer(500)
    gateway = own(start, lab.engine(), collector.url)
    asks(gateway)
    assert eventually(lambda: LOST in gateway.log())
    collector.script = Message.answer
    asks(gateway)
    tree(collector)
    assert eventually(lambda: "takes spans again" in gateway.log())


def test_a_collector_that_is_busy_gets_the_spans_later(
    start: Callable[..., Gateway], lab: Lab, collector: Collector
) -> None:
    collector.once(lambda x: x.answer(503))
    gateway = own(start, lab.engine(), collector.url)
    asks(gateway)
    tree(collector)
    assert collector.seen == 2 and LOST not in gateway.log()
    assert gateway.metric("sekisho_spans_dropped_total") == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_left_is_sent_at_the_end(
    start: Callable[..., Gateway], lab: Lab, collector: Collector, number: int
) -> None:
    """The first message is answered when nothing listens on the port any more; what waits behind it still comes."""
    gateway = own(start, lab.engine(), collector.url)

    def late(x: Message) -> None:
        assert eventually(lambda: not is_open(gateway.port))
        collector.stopping.wait(0.5)
        x.answer()

    collector.once(late)
    asks(gateway)
    assert eventually(lambda: collector.seen == 1)
    asks(gateway, 5)
    gateway.process.send_signal(number)
    assert gateway.wait() == 0
    assert len(collector.spans()) == 10


# --- the configuration
def test_a_reload_changes_where_spans_go_and_how_many(lab: Lab, collector: Collector) -> None:
    engine = lab.engine()
    with Collector() as other:
        lab.serve({"m": [replica(engine)]}, tracing={"endpoint": collector.url})
        lab.chat()
        tree(collector)
        lab.serve({"m": [replica(engine)]}, tracing={"endpoint": other.url})
        lab.chat()
        tree(other)
        lab.serve({"m": [replica(engine)]}, tracing={"endpoint": other.url, "sample": 0})
        lab.chat()
        assert told(engine)[3] == "00"
        lab.serve({"m": [replica(engine)]})
        lab.chat()
        assert not engine.last().values("traceparent")
        lab.serve({"m": [replica(engine)]}, tracing={"endpoint": other.url})
        lab.chat()
        assert eventually(lambda: len(other.spans()) == 4)
    assert len(collector.spans()) == 2


def test_an_endpoint_without_the_package_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[..., Gateway]
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['opentelemetry.exporter'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = base_config({}, [], tracing={"endpoint": "http://127.0.0.1:9/v1/traces"})
    gateway = start(config, wait_for=None)
    assert gateway.wait() == 2
    lines = [line for line in gateway.log().splitlines() if "tracing.endpoint" in line]
    assert len(lines) == 1 and "sekisho[otel]" in lines[0] and "Traceback" not in gateway.log()


# --- exemplars
def test_exemplars_lead_from_the_metrics_to_the_traces(lab: Lab, collector: Collector) -> None:
    one(lab, collector)
    lab.call(chat(stream=True), headers=[PARENT])
    lab.call(chat(stream=True), headers=[PARENT[:-2] + "00"])  # not recorded: nowhere to lead to
    tree(collector)
    answer = lab.gateway.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0,*/*;q=0.1"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    found = {
        sample.name: sample.exemplar
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.exemplar is not None and sample.exemplar.labels == {"trace_id": TRACE}
    }
    names = "request_duration", "time_to_first_token", "time_per_output_token"
    assert found.keys() == {f"sekisho_{name}_seconds_bucket" for name in names}
    assert all(exemplar.value > 0 and exemplar.timestamp for exemplar in found.values())
    plain = lab.gateway.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4") and "trace_id" not in plain.text
    assert not re.search(r"^# EOF", plain.text, re.MULTILINE)


def test_strangers_do_not_decide_what_is_recorded(lab: Lab, collector: Collector) -> None:
    one(lab, collector, sample=0.0)
    stranger, caller = (f"traceparent: 00-{trace * 32}-{'b' * 16}-01" for trace in "ac")
    assert lab.call(chat(), headers=[stranger], key="sk-nobody").status == 401
    assert lab.call(chat(), headers=[caller]).status == 200
    tree(collector, trace_id="c" * 32)  # sent after the other would have been
    assert {span.trace_id for span in collector.spans()} == {"c" * 32}
