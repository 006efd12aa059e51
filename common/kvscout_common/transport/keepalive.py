"""HTTP/2 keepalive, on both sides of every connection: a peer that is gone without a word is noticed within seconds.

No FIN and no RST comes from a node that was lost or is behind a partition. Each side pings the other, with calls or
without: a channel that finds out only at its next call fails that call. Servers let clients ping more often than ours
do.
"""

from __future__ import annotations

TIME_MS = 5_000
"""Silence after which a ping is sent. Together with the time-out within the grace of an owner, 10 s: a gateway that
could not reach its scheduler connects anew while its bookings are still there."""
TIMEOUT_MS = 5_000
"""Longest wait for its answer, which comes from a thread of gRPC: a process that is merely busy gives it directly."""
MIN_RECEIVED_MS = 1_000
ENGINE_TIME_MS = 15_000
"""The same towards engines: their servers end connections on which pings come more often than each 10 s."""

CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", TIME_MS),
    ("grpc.keepalive_timeout_ms", TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    # Else a stream on which nothing is said gets two pings, and no more.
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *CLIENT_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_RECEIVED_MS),
)
