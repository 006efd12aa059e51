"""Common properties of the workers behind one name or selector; which of the rest engines are queried for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from kvscout_common.errors import ConfigError, InvalidArgument, Unavailable
from kvscout_common.registry.engine_facts import EngineFacts
from kvscout_common.registry.workers_file import worker_from_mapping
from kvscout_common.worker import EngineKind, WorkerSpec

GIVEN = {"worker_id", "http_endpoint", "event_endpoints", "dp_start_rank"}
"""Fields that workers of one name cannot share."""
_UNKNOWN: dict[str, Any] = {"worker_id": "?", "model": "?", "block_size": 1, "http_endpoint": "http://unknown:80"}


def fields_of(text: str, query: str, flag: str) -> dict[str, Any]:
    """Return the fields of `kvscout.v1.Worker` as the parameters of a flag, `role=decode&labels.zone=a`.

    Args:
        text: All of the flag's value, for errors.
        query: Its parameters.
        flag: Its name.

    Raises:
        ConfigError: One cannot be shared, or is given twice. Values are checked by `WorkerTemplate`.
    """
    values: dict[str, Any] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        head, _, label = key.partition(".")
        if head in GIVEN or key in values:
            raise ConfigError(f"{key!r} cannot be given in {text!r}, or not twice", field=flag)
        if head == "labels" and label:
            values.setdefault("labels", {})[label] = value
        else:
            values[key] = {"true": True, "false": False}.get(value, value)
    return values


@dataclass(frozen=True, slots=True)
class WorkerTemplate:
    """Fields of `kvscout.v1.Worker`, written as in the workers file."""

    values: Mapping[str, Any]
    where: str
    """Source of them, for errors."""

    def __post_init__(self) -> None:
        """Raises: ConfigError: A field is wrong."""
        worker_from_mapping({**_UNKNOWN, **self.values}, self.where)

    @property
    def open(self) -> bool:
        """Return whether the engine is queried for something without which there is no worker."""
        return not {"model", "block_size"} <= self.values.keys()

    @property
    def engine(self) -> EngineKind | None:
        """Return which engine they are; None = the engine is queried."""
        given = self.values.get("engine")
        return None if given is None else EngineKind(str(given).lower())

    def worker(self, worker_id: str, http_endpoint: str, facts: EngineFacts | None = None) -> WorkerSpec:
        """Return a worker; its events come from what its engine reports later (`engine_discovery`), unless given.

        Raises:
            Unavailable: The engine does not report what is open.
            InvalidArgument: What it reports is wrong.
        """
        values = {**self.values, "worker_id": worker_id, "http_endpoint": http_endpoint}
        if facts is not None:
            values.setdefault("model", facts.models[0] if facts.models else "")
            values.setdefault("block_size", facts.block_size)
        if not values.get("model") or not values.get("block_size"):
            raise Unavailable("its engine does not report its model and block size: give them")
        if facts is not None and facts.engine is not None:
            values.setdefault("engine", facts.engine.value)
        try:
            return worker_from_mapping(values, self.where)
        except ConfigError as error:
            raise InvalidArgument(error.message, field=error.field) from error
