"""Dynamo's standalone services as processes under measurement: its indexer and its selection service, of its wheel.

Both speak JSON over HTTP and bind every interface of the machine: they have no flag for another one.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvscout_bench.peer import dynamo_wheel
from kvscout_bench.service_process import READY_SECONDS, MeasuredProcess, free_port, until
from kvscout_bench.strangers import DriverFailed

MODEL = "bench"
BLOCK_SIZE = 16
QUIET_SECONDS = 0.3
"""Without any CPU time: what was published is applied."""
DRAIN_SECONDS = 120.0


class DynamoService(MeasuredProcess):
    """One of its services on a free port; a context manager that ends it.

    Args:
        module: Such as "indexer".

    Raises:
        DriverFailed: The wheel cannot be installed, or it does not become ready.
    """

    def __init__(self, module: str) -> None:
        port = free_port()
        command = [str(dynamo_wheel()), "-m", f"dynamo.{module}", "--port", str(port)]
        super().__init__(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True))
        self.address = f"127.0.0.1:{port}"
        self.worker_ids: dict[str, int] = {}
        """Its numbers of workers, by ours."""
        try:
            until(self._healthy, f"dynamo.{module} answers", within_seconds=READY_SECONDS)
        except DriverFailed:
            self.close()
            raise

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send JSON, and gives what is answered; blocks.

        Raises:
            DriverFailed: It is refused.
        """
        connection = http.client.HTTPConnection(self.address, timeout=READY_SECONDS)
        try:
            headers = {"content-type": "application/json"}
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status >= 300:
            raise DriverFailed(f"dynamo refuses {path}: {answer.status} {text[:200]!r}")
        return json.loads(text) if text else None

    def until_quiet(self) -> None:
        """Wait until it has nothing to do any more; blocks.

        Raises:
            DriverFailed: It has, for long.
        """

        def quiet() -> bool:
            before = self.cpu_ns()
            time.sleep(QUIET_SECONDS)
            # Its timers take a little.
            return self.cpu_ns() - before < QUIET_SECONDS * 0.02e9

        until(quiet, "dynamo is done", within_seconds=DRAIN_SECONDS)

    def _healthy(self) -> bool:
        if self.ended:
            raise DriverFailed("dynamo's service ended before it was ready")
        try:
            self.request("GET", "/health")
        except (OSError, DriverFailed):
            return False
        return True


class DynamoIndexer(DynamoService):
    """Its indexer: subscribes to engines' own sockets, as ours does."""

    def __init__(self) -> None:
        super().__init__("indexer")
        self._kept = http.client.HTTPConnection(self.address, timeout=READY_SECONDS)

    def __exit__(self, *_: object) -> None:
        self._kept.close()
        super().__exit__()

    def register(self, worker_id: str, endpoint: str) -> None:
        """Register a worker of one rank that publishes at an endpoint."""
        number = self.worker_ids.setdefault(worker_id, len(self.worker_ids))
        worker = {"instance_id": number, "endpoint": endpoint, "model_name": MODEL, "block_size": BLOCK_SIZE}
        self.request("POST", "/register", worker)

    def holds(self, tokens: Sequence[int]) -> bool:
        """Return whether any worker holds the beginning of a prompt; over one connection, for one thread."""
        body = json.dumps({"model_name": MODEL, "token_ids": list(tokens)})
        self._kept.request("POST", "/query", body, {"content-type": "application/json"})
        return bool(json.loads(self._kept.getresponse().read())["scores"])

    def until_applied(self, batches: int) -> float:
        """Wait until it has nothing to do, since it does not report what it applied; return how long that took."""
        self.until_quiet()
        return QUIET_SECONDS


class DynamoSelector(DynamoService):
    """Its selection service: an index of its own, fed by the engines' sockets, and the load that it books."""

    def __init__(self) -> None:
        super().__init__("select_service")

    def register(self, worker_id: str, endpoint: str) -> None:
        """Register a worker of one rank that publishes at an endpoint."""
        number = self.worker_ids.setdefault(worker_id, len(self.worker_ids))
        worker = {
            "worker_id": number,
            "model_name": MODEL,
            "endpoint": f"http://127.0.0.1:{1 + number}",
            "kv_events_endpoint": endpoint,
            "block_size": BLOCK_SIZE,
            "data_parallel_size": 1,
        }
        self.request("POST", "/workers", worker)

    def until_schedulable(self) -> None:
        """Wait until every worker takes requests; blocks.

        Raises:
            DriverFailed: One does not.
        """

        def all_do() -> bool:
            return all(worker["lifecycle"] == "schedulable" for worker in self.request("GET", "/workers"))

        until(all_do, "dynamo's workers take requests")
