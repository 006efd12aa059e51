"""Recordings of real traffic (`kvscout record`): files of JSON lines, written and read here, and as a workload.

The first line of a file is its head, with the workers of then; each further line is a request that ended, so that lines
are in the order of ends. A line has the four fields of Mooncake's format (`timestamp`, `input_length`, `output_length`,
`hash_ids`) and more; docs/laboratory.md has them all. Hash ids are of prefixes, keyed, and cut to 53 bits, which every
JSON reader keeps.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvscout.v1 import gateway_pb2
from kvscout_common.errors import ConfigError
from kvscout_common.worker import WorkerSpec
from kvscout_lab.workloads.trace import MAX_LINE_BYTES, TOKENS_PER_HASH, open_lines
from kvscout_lab.workloads.workload import Flow, Turn, Workload

HEAD: Final = "kvscout_recording"
"""Key of the head, with the version of the format."""
VERSION: Final = 1
SESSION_PAUSE_SECONDS: Final = 3_600.0
"""A session that is silent for longer goes on as another one."""
MAX_PARTS: Final = 64
"""Blocks of a hash; a node is a hash times their number, and below `_FRESH`."""
_ID_SHIFT: Final = 64 - 53
_FRESH: Final = 1 << 60
"""Nodes from here on are of blocks without a hash."""


@dataclass(frozen=True, slots=True)
class RecordedWorker:
    """A worker, as it was registered."""

    worker_id: str
    model: str
    role: str
    dp_size: int
    block_size: int
    total_kv_blocks: int
    """Of each rank; 0 = unknown."""
    max_num_batched_tokens: int
    """0 = unknown."""

    @classmethod
    def of(cls, spec: WorkerSpec) -> RecordedWorker:
        """Return what is recorded of a registration."""
        return cls(
            spec.worker_id,
            spec.model,
            spec.role.value,
            spec.dp_size,
            spec.block_size,
            spec.total_kv_blocks,
            spec.max_num_batched_tokens,
        )


class RecordedRequest(NamedTuple):
    """A request that ended; without hashes where its tokens were not known."""

    arrived: float
    """Seconds since the Unix epoch."""
    model: str
    session: int
    """0 = unknown."""
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    """0 = none."""
    streamed: bool
    priority: int
    tokens_per_hash: int
    hash_ids: tuple[int, ...]
    worker_id: str
    """"" = none ran it."""
    dp_rank: int
    predicted_tokens: int
    cached_tokens: int | None
    """None = the engine did not say."""
    ttft_seconds: float
    """0 = it had no output."""
    seconds: float
    outcome: str
    degraded: str


@dataclass(frozen=True, slots=True)
class Recording:
    """Recorded traffic of one model."""

    workers: tuple[RecordedWorker, ...]
    requests: tuple[RecordedRequest, ...]
    """In the order in which they came."""


# Writing


def head(gateways: Sequence[str], workers: Iterable[RecordedWorker]) -> str:
    """Return the first line of a file."""
    return json.dumps({HEAD: VERSION, "gateways": list(gateways), "workers": [asdict(one) for one in workers]})


def line_of(request: gateway_pb2.RecordedRequest, gateway: str) -> str:
    """Return the line of a request; what is unknown, or as usual, is left out."""
    fields: dict[str, Any] = {
        "timestamp": round(request.arrived_unix_seconds * 1000, 3),
        "input_length": request.prompt_tokens,
        "output_length": request.output_tokens,
        "hash_ids": [hash_ >> _ID_SHIFT for hash_ in request.prefix_hashes],
        "tokens_per_hash": request.tokens_per_hash,
        "model": request.model,
        "outcome": request.outcome,
        "duration_ms": round(request.seconds * 1000, 3),
    }
    optional = {
        "tenant": request.tenant if request.tenant != "default" else "",
        "session": request.session >> _ID_SHIFT,
        "max_tokens": request.max_tokens,
        "priority": request.priority,
        "worker": request.worker_id,
        "dp_rank": request.dp_rank,
        "predicted_tokens": request.predicted_tokens,
        "ttft_ms": round(request.ttft_seconds * 1000, 3),
        "degraded": request.degraded,
        "gateway": gateway,
    }
    fields |= {name: value for name, value in optional.items() if value}
    if request.HasField("cached_tokens"):
        fields["cached_tokens"] = request.cached_tokens
    if not request.streamed:
        fields["streamed"] = False
    return json.dumps(fields, separators=(",", ":"))


def mooncake_lines(requests: Iterable[RecordedRequest]) -> Iterator[str]:
    """Yield requests in Mooncake's format, with times from the first one on; those without known tokens are left out.

    Its ids are of 512 tokens each, the last of perhaps fewer: such a rest is shared with nobody here.
    """
    fresh = itertools.count(_FRESH >> _ID_SHIFT)
    first = None
    for request in requests:
        covered = len(request.hash_ids) * request.tokens_per_hash
        if not request.tokens_per_hash or covered + TOKENS_PER_HASH <= request.prompt_tokens:
            continue
        if TOKENS_PER_HASH % request.tokens_per_hash:
            raise ConfigError(
                f"hashes of {request.tokens_per_hash} tokens do not make one of {TOKENS_PER_HASH}: record with "
                f"--tokens-per-hash {TOKENS_PER_HASH}, or a part of it",
                field="recording",
            )
        first = request.arrived if first is None else first
        stride = TOKENS_PER_HASH // request.tokens_per_hash
        ids = list(request.hash_ids[stride - 1 :: stride])
        ids += [next(fresh) for _ in range(-(-request.prompt_tokens // TOKENS_PER_HASH) - len(ids))]
        fields = {
            "timestamp": round((request.arrived - first) * 1000),
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": ids,
        }
        yield json.dumps(fields, separators=(",", ":"))


# Reading


def is_recording(path: Path) -> bool:
    """Return whether a file begins as a recording does.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        with open_lines(path) as lines:
            start = lines.read(len(HEAD) + 4)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", field="trace") from error
    return start.lstrip().startswith(f'{{"{HEAD}"')


def read_recording(paths: Sequence[Path], model: str = "") -> Recording:
    """Return the requests of one model, of all files together.

    Args:
        paths: Files of one or several gateways, in any order; of overlapping ones each request counts.
        model: "" = the one that has most requests.

    Raises:
        ConfigError: A file cannot be read or a line is not as described; names file and line. Or the model has none.
    """
    workers: dict[str, RecordedWorker] = {}
    requests: list[RecordedRequest] = []
    for path in paths:
        for number, fields in _lines(path):
            try:
                if HEAD in fields:
                    _check_version(fields)
                    workers |= {one["worker_id"]: RecordedWorker(**one) for one in fields["workers"]}
                else:
                    requests.append(_parse(fields))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                raise ConfigError(f"{path}:{number}: no line of a recording: {error!r}", field="trace") from error
    counts = Counter(request.model for request in requests)
    model = model or (counts.most_common(1)[0][0] if counts else "")
    found = sorted((request for request in requests if request.model == model), key=lambda one: one.arrived)
    if not found:
        known = f"; it has {', '.join(sorted(counts))}" if counts else ""
        raise ConfigError(f"the recording has no request of model {model!r}{known}", field="model")
    served = {request.worker_id for request in found}
    chosen = (one for one in workers.values() if one.model == model or one.worker_id in served)
    return Recording(tuple(chosen), tuple(found))


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with open_lines(path) as lines:
            for number in itertools.count(1):
                line = lines.readline(MAX_LINE_BYTES)
                if not line:
                    return
                try:
                    fields = json.loads(line)
                except (ValueError, RecursionError) as error:
                    if not line.endswith("\n"):
                        return  # the recorder was killed while it wrote
                    raise ConfigError(f"{path}:{number}: no JSON: {error}", field="trace") from error
                if not isinstance(fields, dict):
                    raise ConfigError(f"{path}:{number}: no JSON object", field="trace")
                yield number, fields
    except EOFError:
        return  # likewise: the end of the compressed file is missing
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", field="trace") from error


def _check_version(fields: Mapping[str, Any]) -> None:
    if fields[HEAD] != VERSION:
        raise ValueError(f"version {fields[HEAD]}, this release reads {VERSION}")


def _parse(fields: Mapping[str, Any]) -> RecordedRequest:
    cached = fields.get("cached_tokens")
    request = RecordedRequest(
        arrived=float(fields["timestamp"]) / 1000,
        model=str(fields["model"]),
        session=int(fields.get("session", 0)),
        prompt_tokens=int(fields["input_length"]),
        output_tokens=int(fields["output_length"]),
        max_tokens=int(fields.get("max_tokens", 0)),
        streamed=bool(fields.get("streamed", True)),
        priority=int(fields.get("priority", 0)),
        tokens_per_hash=int(fields["tokens_per_hash"]),
        hash_ids=tuple(map(int, fields["hash_ids"])),
        worker_id=str(fields.get("worker", "")),
        dp_rank=int(fields.get("dp_rank", 0)),
        predicted_tokens=int(fields.get("predicted_tokens", 0)),
        cached_tokens=None if cached is None else int(cached),
        ttft_seconds=float(fields.get("ttft_ms", 0)) / 1000,
        seconds=float(fields["duration_ms"]) / 1000,
        outcome=str(fields["outcome"]),
        degraded=str(fields.get("degraded", "")),
    )
    if min(request.prompt_tokens, request.output_tokens, request.tokens_per_hash, *request.hash_ids, 0) < 0:
        raise ValueError("a number is negative")
    if len(request.hash_ids) * request.tokens_per_hash > request.prompt_tokens:
        raise ValueError("hash_ids cover more than input_length")
    return request


# As a workload


def from_recording(name: str, recording: Recording, limit: int = 0) -> Workload:
    """Return the recorded requests as flows: sessions in which each turn comes its pause after the answer before it.

    What was generated is a part of the next turn's prompt where its hashes say so. A request without known tokens has
    a prompt that nobody shares.

    Args:
        name: Name of the workload.
        recording: What was recorded.
        limit: Number of requests, the first; 0 = all.

    Raises:
        ConfigError: The requests have hashes of different numbers of tokens.
    """
    requests = recording.requests[: limit or None]
    sizes = {request.tokens_per_hash for request in requests if request.hash_ids}
    if len(sizes) > 1:
        raise ConfigError(f"its hashes are of {sorted(sizes)} tokens: replay one kind at a time", field="trace")
    hashed = sizes.pop() if sizes else TOKENS_PER_HASH
    parts = _parts(hashed, recording.workers)
    size = hashed // parts
    fresh = itertools.count(_FRESH)
    started = requests[0].arrived
    flows = []
    for session in _sessions(requests):
        pauses = [0.0, *(max(0.0, _pause(before, request)) for before, request in itertools.pairwise(session))]
        turns = [
            Turn(
                _nodes(request, following, size, parts, fresh),
                max(1, request.prompt_tokens),
                request.output_tokens,
                pause,
                request.priority,
                request.max_tokens,
                request.streamed,
            )
            for pause, request, following in zip(pauses, session, [*session[1:], None], strict=True)
        ]
        flows.append(Flow(session[0].arrived - started, tuple(turns)))
    return Workload(name, size, tuple(sorted(flows, key=lambda flow: flow.start_seconds)))


def _sessions(requests: Sequence[RecordedRequest]) -> Iterator[list[RecordedRequest]]:
    """Yield sessions whose turns follow one another; turns of one session that overlap are sessions of their own."""
    open_sessions: dict[int, list[list[RecordedRequest]]] = defaultdict(list)
    for request in requests:
        if not request.session:
            yield [request]
            continue
        for session in open_sessions[request.session]:
            if 0 <= _pause(session[-1], request) <= SESSION_PAUSE_SECONDS:
                session.append(request)
                break
        else:
            open_sessions[request.session].append([request])
    for sessions in open_sessions.values():
        yield from sessions


def _pause(before: RecordedRequest, request: RecordedRequest) -> float:
    """Return the seconds between the end of a request and the next one; below 0: they overlap."""
    return request.arrived - before.arrived - before.seconds


def _parts(hashed: int, workers: Iterable[RecordedWorker]) -> int:
    """Return the blocks of the engines that a hash stands for: engines find a prefix that ends within one."""
    sizes = {one.block_size for one in workers}
    parts = hashed // sizes.pop() if len(sizes) == 1 and not hashed % min(sizes) else 1
    return parts if parts <= MAX_PARTS else 1


def _nodes(
    request: RecordedRequest, following: RecordedRequest | None, size: int, parts: int, fresh: Iterator[int]
) -> array[int]:
    """Return the nodes of the complete blocks of prompt and output."""
    known = request.hash_ids[: request.prompt_tokens // (size * parts)]
    blocks = (request.prompt_tokens + request.output_tokens) // size
    if following is not None and following.hash_ids[: len(known)] == known:
        known = following.hash_ids[: -(-blocks // parts)]
    nodes = array("Q", (hash_ * parts + part for hash_ in known for part in range(parts)))[:blocks]
    return nodes + array("Q", itertools.islice(fresh, blocks - len(nodes)))
