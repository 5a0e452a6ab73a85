"""What an operator learns of a running server: log lines, figures, and the way of each call.

    logs       one line an event, as text or JSON, on stderr
    metrics    counters and latencies for Prometheus and for `status`
    spans      OpenTelemetry spans; they cost nothing until somebody sets up its SDK

Names of chats, tools and backends, numbers and outcomes are told; contents, code, paths and
secrets never are.
"""
