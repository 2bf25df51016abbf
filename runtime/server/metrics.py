"""Figures for Prometheus, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..api import GenerationStats

if TYPE_CHECKING:
    from .service import Service

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_RATES = (0.5, 1, 2, 5, 10, 20, 50, 100, 200)

_COUNTERS = {
    "requests_finished": "Generations with a result.",
    "requests_failed": "Generations with an error.",
    "requests_cancelled": "Generations given up by their callers.",
    "prompt_tokens": "Tokens of prompts, of ended requests.",
    "cached_tokens": "Of these, tokens taken from the prompt cache.",
    "prompt_cache_evicted": "Sequences that left the prompt cache for want of room.",
    "tokens": "Tokens generated, of ended requests.",
    "hits": "Routed experts found resident.",
    "misses": "Routed experts that were waited for.",
    "joins": "Misses whose read was on its way.",
    "reads": "Reads of experts.",
    "read_errors": "Reads that failed.",
    "bytes_read": "Bytes read from the drive.",
    "wasted_bytes": "Bytes read for guesses given up unused.",
    "stall_seconds": "Time in which computing waited for reads.",
    "sync_seconds": "Time inside MLX's evaluations.",
    "host_seconds": "Time in Python between them.",
    "trace_events_dropped": "Events that did not fit the trace buffer.",
}
_GAUGES = {
    "requests_running": "Generations being computed.",
    "requests_waiting": "Generations queued in the engine.",
    "slot_bytes": "Memory of all slot pools.",
    "prompt_cache_bytes": "Memory of the prompt cache.",
    "prompt_cache_sequences": "Token sequences in the prompt cache.",
    "trunk_bytes": "Memory of trunk and resident layers.",
    "memory_bytes": "Memory held by MLX.",
    "peak_memory_bytes": "Most memory held by MLX so far.",
    "hit_rate": "Share of routed experts found resident since the start.",
}


class Metrics:
    """The counters of a server, and the statistics of its engine when they are asked for."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(service))
        self._requests = Counter(
            "moestream_http_requests",
            "Requests answered.",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "moestream_http_request_seconds",
            "From a request's headers to the end of its answer.",
            ["endpoint"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.disconnects = Counter(
            "moestream_http_disconnects",
            "Clients that left before their answer was complete.",
            registry=self.registry,
        )
        self._queued = Histogram(
            "moestream_queue_seconds",
            "Waiting of a generation for its turn.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._first = Histogram(
            "moestream_time_to_first_token_seconds",
            "From a generation's turn to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._rate = Histogram(
            "moestream_decode_tokens_per_second",
            "Of a generation's tokens behind the first.",
            buckets=_RATES,
            registry=self.registry,
        )

    def answered(self, endpoint: str, status: int, seconds: float) -> None:
        """A request has been answered."""
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def generated(self, stats: GenerationStats) -> None:
        """A generation has ended with a result."""
        self._queued.observe(stats.queued_seconds)
        self._first.observe(stats.time_to_first_token)
        if stats.decode_tokens_per_second:
            self._rate.observe(stats.decode_tokens_per_second)

    def text(self) -> bytes:
        """Everything in Prometheus's format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        """Nothing: the registry need not ask the engine for names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The engine's and the server's figures of this moment."""
        service = self._service
        statistics = service.engine.statistics()
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(
                f"moestream_engine_{name}", text, value=getattr(statistics, name)
            )
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(
                f"moestream_engine_{name}", text, value=getattr(statistics, name)
            )
        drive = statistics.prefetch
        yield CounterMetricFamily(
            "moestream_engine_drive_busy_seconds",
            "Time in which at least one lane was reading.",
            value=drive.drive_busy_seconds,
        )
        yield CounterMetricFamily(
            "moestream_server_tokens", "Tokens generated, as they come.", value=service.tokens
        )
        yield GaugeMetricFamily(
            "moestream_server_active",
            "Generations running or waiting.",
            value=service.admission.active,
        )
        yield CounterMetricFamily(
            "moestream_server_refused",
            "Requests refused because too many wait.",
            value=service.admission.refused,
        )
        yield GaugeMetricFamily(
            "moestream_up", "1 while the engine takes requests.", value=int(service.engine.alive)
        )
