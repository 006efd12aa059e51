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

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor

from kvscout.v1 import workers_pb2
from kvscout_common.errors import ConfigError, InvalidArgument
from kvscout_common.known_names import or_known
from kvscout_common.process.followed_file import FollowedFile, located, read_yaml
from kvscout_common.registry.registry import Registry, Source, any_worker
from kvscout_common.registry.worker_proto import spec_from_proto
from kvscout_common.worker import WorkerSpec

log = logging.getLogger("kvscout.registry")

MAX_BYTES = 2 * 1024 * 1024
MAX_WORKERS = 5_000
"""They take effect in one step of the event loop."""

_ENUM_PREFIXES = {
    "role": "ROLE_",
    "engine": "ENGINE_KIND_",
    "device_class": "DEVICE_CLASS_",
    "transport": "EVENT_TRANSPORT_",
    "copies": "COPY_MODE_",
}


def load_workers(path: Path, admit: Callable[[WorkerSpec], None] = any_worker) -> list[WorkerSpec]:
    """Read and validate a workers file.

    Args:
        path: The file.
        admit: `Registry.admit`.

    Raises:
        ConfigError: If it cannot be read or an entry is wrong; names the entry and the key.
    """
    document = read_yaml(path, flag="workers_file", max_bytes=MAX_BYTES)
    if document is None:
        return []
    entries = document.get("workers") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ConfigError(f"{path} has no list 'workers'", field="workers_file")
    if len(entries) > MAX_WORKERS:
        raise ConfigError(f"{path} has {len(entries):,} workers; at most {MAX_WORKERS:,} can be", field="workers_file")
    try:
        return _workers(entries, admit)
    except ConfigError as error:
        raise located(error, path, max_bytes=MAX_BYTES) from error.__cause__


def _workers(entries: list[Any], admit: Callable[[WorkerSpec], None]) -> list[WorkerSpec]:
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
    """Read one worker as the file writes it.

    Args:
        entry: A mapping of the fields of `kvscout.v1.Worker`.
        where: Name of the entry, for errors.

    Raises:
        ConfigError: A key or value is wrong.
    """
    if not isinstance(entry, dict):
        raise ConfigError("is not a mapping", field=where)
    _check_keys(entry, workers_pb2.Worker.DESCRIPTOR, where)
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
        raise _value_error(entry, values, where) or ConfigError(str(error), field=where) from error
    except InvalidArgument as error:
        raise ConfigError(error.message, field=f"{where}.{error.field}") from error


def _check_keys(entry: Any, message: Descriptor, where: str) -> None:
    """Refuse keys that a message does not have, also within it.

    Raises:
        ConfigError: Names the key, and the nearest that there is.
    """
    if not isinstance(entry, dict):
        return
    for key, value in entry.items():
        field = message.fields_by_name.get(str(key)) or message.fields_by_camelcase_name.get(str(key))
        if field is None:
            raise ConfigError(
                f"there is no such key{or_known(str(key), message.fields_by_name)}", field=f"{where}.{key}"
            )
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for number, inner in enumerate(value if isinstance(value, list) else ()):
            _check_keys(inner, field.message_type, f"{where}.{key}[{number}]")


def _value_error(entry: Mapping[Any, Any], values: Mapping[str, Any], where: str) -> ConfigError | None:
    """Return the error of the first key whose value cannot be read; None = each can."""
    for key, value in values.items():
        try:
            json_format.ParseDict({key: value}, workers_pb2.Worker())
        except json_format.ParseError:
            field = workers_pb2.Worker.DESCRIPTOR.fields_by_name.get(key)
            if key in _ENUM_PREFIXES and field is not None and field.enum_type is not None:
                words = [name.removeprefix(_ENUM_PREFIXES[key]).lower() for name in field.enum_type.values_by_name]
                known = [word.replace("_", "-") for word in words if word != "unspecified"]
                problem = f"{str(entry[key])[:100]!r} is not one of these{or_known(str(entry[key]), known)}"
            else:
                problem = f"cannot be {str(entry[key])[:100]!r}"
            return ConfigError(problem, field=f"{where}.{key}")
    return None


class WorkersFile(FollowedFile[list[WorkerSpec]]):
    """Keeps a registry equal to a file."""

    def __init__(self, path: Path, registry: Registry) -> None:
        def apply(specs: list[WorkerSpec]) -> None:
            registry.replace_source(Source.FILE, specs)
            log.info("%d workers from %s", len(specs), path)

        super().__init__("workers file", (path,), lambda: load_workers(path, registry.admit), apply)
