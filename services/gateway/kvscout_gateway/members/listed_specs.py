"""Registrations as a member lists them, round by round."""

from __future__ import annotations

from kvscout.v1 import workers_pb2
from kvscout_common.registry.worker_proto import spec_from_proto
from kvscout_common.worker import WorkerSpec


class ListedSpecs:
    """Reads a registration when it is new or has changed: of a fleet nearly all are as they were a round ago."""

    def __init__(self) -> None:
        self._before: dict[bytes, WorkerSpec] = {}
        self._now: dict[bytes, WorkerSpec] = {}

    def begin(self) -> None:
        """A new round: what the last one did not list is forgotten."""
        self._before, self._now = self._now, {}

    def read(self, worker: workers_pb2.Worker) -> WorkerSpec:
        """A registration of this round.

        Raises:
            InvalidArgument: It is none.
        """
        serialised = worker.SerializeToString(deterministic=True)
        spec = self._before.get(serialised) or spec_from_proto(worker)
        self._now[serialised] = spec
        return spec
