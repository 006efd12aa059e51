"""The replicas of a scheduler process: core, connection, forwarding; and what is shown of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvscout.v1 import replication_pb2, scheduler_pb2
from kvscout_common.nats.link import NatsLink
from kvscout_scheduler.replicas.forwarding import Forwarding
from kvscout_scheduler.replicas.link import ReplicaLink
from kvscout_scheduler.replicas.replication import Replication
from kvscout_scheduler.scheduler import Scheduler


class Replicas:
    """This replica and what it knows of the others.

    Args:
        scheduler: The core that is replicated.
        replication: It, as a replica.
        link: NATS.
    """

    def __init__(self, scheduler: Scheduler, replication: Replication, link: NatsLink) -> None:
        self.replication = replication
        self.link = ReplicaLink(link, replication, self._answer)
        self.forwarding = Forwarding(scheduler, replication, self.link.request)

    def _answer(self, asked: replication_pb2.ForwardedOperation) -> replication_pb2.ForwardedResult:
        return self.forwarding.answer(asked)

    def to_proto(self) -> scheduler_pb2.GetReplicasResponse:
        """What `GetReplicas` answers."""
        return scheduler_pb2.GetReplicasResponse(
            replicas=self.replication.status(),
            problem=self.link.problem,
            forwarded=self.forwarding.forwarded,
            taken_over=self.replication.ownership.taken_over_count,
        )

    def collect(self) -> Iterator[Metric]:
        """Samples for Prometheus."""
        replication = self.replication
        lag = GaugeMetricFamily("kvscout_replica_lag_events", "Events not applied yet", labels=["replica"])
        behind = GaugeMetricFamily("kvscout_replica_lag_seconds", "Since when events are missing", labels=["replica"])
        owned = GaugeMetricFamily("kvscout_replica_requests", "Requests, by owner", labels=["replica"])
        statuses = replication.status()
        for status in statuses:
            # Of a replica that was started again the incarnations before it are not lag.
            if status.live:
                lag.add_metric([status.replica_id], status.lag_events)
                behind.add_metric([status.replica_id], status.lag_seconds)
                owned.add_metric([status.replica_id], status.owned_requests)
        yield from (lag, behind, owned)
        yield GaugeMetricFamily(
            "kvscout_replicas_connected", "1 = other replicas can be reached", value=float(not self.link.problem)
        )
        yield GaugeMetricFamily(
            "kvscout_replica_transit_seconds", "From sending to applying, last batch", value=replication.transit_seconds
        )
        counts = {
            "divergences": (self._count("divergences", statuses), "Digests that differ"),
            "gaps": (self._count("gaps", statuses), "Gaps in the events of others"),
            "snapshots": (self._count("snapshots", statuses), "Snapshots applied"),
            "forwarded": (self.forwarding.forwarded, "Operations carried out by their owner"),
            "forwards_unanswered": (self.forwarding.unanswered, "Operations that an owner did not answer in time"),
            "taken_over": (replication.ownership.taken_over_count, "Requests taken over from others"),
            "messages_lost": (self.link.lost, "Messages that could not be sent"),
            "messages_refused": (replication.refused, "Messages that could not be read"),
        }
        for name, (count, help_) in counts.items():
            yield CounterMetricFamily(f"kvscout_replica_{name}", help_, value=count)

    def _count(self, name: str, statuses: Iterable[scheduler_pb2.Replica]) -> float:
        """Of all views, those that are forgotten included."""
        return float(self.replication.ended[name] + sum(getattr(status, name) for status in statuses))
