"""OpenTelemetry traces, over OTLP and HTTP.

`context` reads which trace a request belongs to. `trace` notes ids and times while it runs. Once it is booked, `tracer`
hands what is known of it to `sender`, whose thread has `spans` made of it and sends them. Nothing of OpenTelemetry is
imported before an endpoint is configured, and nothing is imported here: the first two belong to the path of a request.
"""
