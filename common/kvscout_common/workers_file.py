"""The YAML file of workers, watched for changes.

::

    workers:
      - worker_id: vllm-0
        model: llama-3-8b
        block_size: 16
        http_endpoint: http://10.0.0.5:8000
        event_endpoints:
          - {endpoint: "tcp://10.0.0.5:5557", replay_endpoint: "tcp://10.0.0.5:5657"}

Keys are the fields of `kvscout.v1.Worker`; enums are written in lower case without their prefix ("prefill",
"sglang", "gpu", "zmq", "set").
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from google.protobuf import json_format

from kvscout.v1 import workers_pb2
from kvscout_common.errors import ConfigError, InvalidArgument
from kvscout_common.registry import Registry, Source, any_worker
from kvscout_common.worker import WorkerSpec
from kvscout_common.worker_proto import spec_from_proto

log = logging.getLogger("kvscout.registry")

POLL_SECONDS = 1.0
"""How often the file is looked at: polling also sees the symlink swaps of Kubernetes config maps."""

_ENUM_PREFIXES = {
    "role": "ROLE_",
    "engine": "ENGINE_KIND_",
    "device_class": "DEVICE_CLASS_",
    "transport": "EVENT_TRANSPORT_",
    "copies": "COPY_MODE_",
}


def load_workers(path: Path, admit: Callable[[WorkerSpec], None] = any_worker) -> list[WorkerSpec]:
    """Reads and validates a workers file.

    Args:
        path: The file.
        admit: `Registry.admit`.

    Raises:
        ConfigError: If it cannot be read or an entry is wrong; names the entry and the key.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        # ValueError: no UTF-8, or a date that does not exist.
        raise ConfigError(f"cannot read {path}: {error}", field="workers_file") from error
    if document is None:
        return []
    entries = document.get("workers") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ConfigError(f"{path} has no list 'workers'", field="workers_file")
    specs: dict[tuple[str, str], WorkerSpec] = {}
    for number, entry in enumerate(entries):
        where = f"workers.{number}"
        spec = worker_from_mapping(entry, where)
        try:
            admit(spec)
        except InvalidArgument as error:
            raise ConfigError(error.message, field=f"{where}.{error.field}") from error
        if (spec.tenant, spec.worker_id) in specs:
            raise ConfigError(f"{spec.worker_id!r} is given twice", field=f"{where}.worker_id")
        specs[spec.tenant, spec.worker_id] = spec
    return list(specs.values())


def worker_from_mapping(entry: Any, where: str) -> WorkerSpec:
    """Reads one worker as the file writes it.

    Args:
        entry: A mapping of the fields of `kvscout.v1.Worker`.
        where: Name of the entry, for errors.

    Raises:
        ConfigError: A key or value is wrong.
    """
    if not isinstance(entry, dict):
        raise ConfigError("is not a mapping", field=where)
    values = dict(entry)
    for key, prefix in _ENUM_PREFIXES.items():
        if key in values:
            values[key] = prefix + str(values[key]).upper().replace("-", "_")
    if "labels" in values:
        if not isinstance(values["labels"], dict):
            raise ConfigError("is not a mapping", field=f"{where}.labels")
        values["labels"] = {str(k): str(v) for k, v in values["labels"].items()}
    try:
        return spec_from_proto(json_format.ParseDict(values, workers_pb2.Worker()))
    except json_format.ParseError as error:
        raise ConfigError(str(error), field=where) from error
    except InvalidArgument as error:
        raise ConfigError(error.message, field=f"{where}.{error.field}") from error


class WorkersFile:
    """Keeps a registry equal to a file."""

    def __init__(self, path: Path, registry: Registry) -> None:
        self._path = path
        self._registry = registry
        self._last: bytes | None = None
        self.error = ""
        """Why the file's current content is not in effect; "" = it is."""

    def load(self) -> None:
        """Reads the file now.

        Raises:
            ConfigError: As `load_workers`; the registry is then unchanged.
        """
        content = self._path.read_bytes()
        specs = load_workers(self._path, self._registry.admit)
        self._last = content
        self._registry.replace_source(Source.FILE, specs)
        log.info("%d workers from %s", len(specs), self._path)

    async def watch(self, sleep: Callable[[float], Any] = asyncio.sleep) -> None:
        """Follows the file for ever. A content that is wrong is logged once and changes nothing."""
        while True:
            await sleep(POLL_SECONDS)
            try:
                content = self._path.read_bytes()
                if content == self._last:
                    continue
                self._last = content
                self.load()
                self.error = ""
            except (OSError, ConfigError) as error:
                if str(error) != self.error:
                    log.error("workers file not in effect, the last good one stays: %s", error)
                self.error = str(error)
