"""What an operator learns of a running server: log lines, figures, and the way of each call.

    calls      the record of a call, that all these are made from, and OpenTelemetry spans
    logs       one line an event, as text or JSON, on stderr
    metrics    counters, latencies and blocks of the event loop, for Prometheus and for `status`

Names of chats, tools and backends, numbers and outcomes are told; contents, code, paths and
secrets never are.
"""
