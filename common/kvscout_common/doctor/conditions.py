"""Everything that doctor can find: what it means, and what helps. In the order in which it is told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a condition is."""

    ERROR = "error"
    """Routing is blind or wrong, or a part of it is not there."""
    WARNING = "warning"
    """Routing is less good than it could be, or will be after the next fault."""
    NOTE = "note"
    """Doctor could not see something."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing that can be wrong."""

    id: str
    severity: Severity
    what: str
    remedy: str


def _error(name: str, what: str, remedy: str) -> Condition:
    return Condition(name, Severity.ERROR, what, remedy)


def _warning(name: str, what: str, remedy: str) -> Condition:
    return Condition(name, Severity.WARNING, what, remedy)


def _note(name: str, what: str, remedy: str) -> Condition:
    return Condition(name, Severity.NOTE, what, remedy)


# Services

SERVICE_UNREACHABLE = _error(
    "service-unreachable",
    "No service answers at an address.",
    "Start it there, or correct the address where it is given: --gateway, --indexer, --scheduler, --envoy-admin, a "
    "bridge's --advertise. With TLS or tokens on, give --tls-ca and --token-file.",
)
WRONG_SERVICE = _error(
    "wrong-service",
    "Another kind of service answers at an address than it is given for.",
    "Exchange the addresses: indexers listen on 7051, schedulers on 7052, bridges on 7053 unless told otherwise.",
)
HELPER_FAILING = _warning(
    "helper-failing",
    "A gateway's last call to an indexer or scheduler failed: it routes with less knowledge meanwhile.",
    "Look at the helper's log and load. If it is only slow, raise --indexer-timeout-ms or --scheduler-timeout-ms.",
)
NOT_SERVING = _warning(
    "not-serving",
    "A service answers and takes no calls now.",
    "One that starts waits for its workers, for NATS and for peers, at most a minute; one that drains ends by itself.",
)

# The proxy in front of the engines

PROXY_OVERFLOW = _warning(
    "proxy-overflow",
    "An Envoy refused requests or retries, or made them wait for a connection, at the limits of its circuit breakers.",
    "Raise the thresholds of the cluster's circuit_breakers, as deploy/envoy/envoy.yaml does: without them Envoy "
    "allows 3 retries and 1,024 requests.",
)
PICKER_BYPASSED = _warning(
    "picker-bypassed",
    "Requests went past the endpoint picker, by turns and unbooked, because an Envoy could not ask it.",
    "Expected while no picker runs. Else look at the picker's load and log, at Envoy's message_timeout, and at the "
    "circuit_breakers of the picker's cluster.",
)

# NATS

NATS_UNREACHABLE = _error(
    "nats-unreachable",
    "A service is not connected to NATS: registrations, events and replicas that come over it are missing.",
    "Start NATS, or correct --nats-server, --nats-credentials and --nats-ca. The service connects by itself.",
)
NATS_WITHOUT_JETSTREAM = _error(
    "nats-without-jetstream",
    "NATS runs without JetStream, in which registrations, streams and snapshots are kept.",
    "Start nats-server with -js (or `jetstream {}` in its configuration), or enable JetStream for the account.",
)
NATS_NAMESPACES_DIFFER = _error(
    "nats-namespaces-differ",
    "Services of one kvscout have different --namespace: they see nothing of each other in NATS.",
    "Give all of them, bridges and publishers included, the same --namespace.",
)
NATS_CLUSTERS_DIFFER = _warning(
    "nats-clusters-differ",
    "Services are connected to different NATS servers.",
    "Give all of them the same --nats-server, unless these servers are joined by gateways or leaf nodes.",
)

# Who knows which workers

NO_WORKERS = _error(
    "no-workers",
    "A gateway knows no worker: every request is refused.",
    "Register some: --workers-file, --workers-k8s, --workers-dns, `kvscout workers register`, or a bridge in the same"
    " NATS namespace.",
)
SCHEDULER_WITHOUT_WORKERS = _error(
    "scheduler-without-workers",
    "A scheduler knows none of the workers that its gateway knows: it can choose none.",
    "Its gateway tells it as soon as it reaches it. With NATS, give both the same --nats-server and --namespace.",
)
REGISTRATIONS_DIFFER = _error(
    "registrations-differ",
    "A gateway and its helpers know different workers, or the same ones differently.",
    "A moment after a change this passes. Else give all the same registry: one NATS namespace, or one workers file.",
)
TENANTS_SHARE_ENGINE = _warning(
    "tenants-share-engine",
    "Workers of several tenants are one engine, whose cache is one: each can tell from overlaps, usage and times to "
    "the first token which prefixes the other has sent.",
    "Give each tenant engines of its own, or have each tenant's requests carry a cache_salt of its own.",
)
SHARDS_DIFFER = _error(
    "shards-differ",
    "An indexer has another share of the workers than its gateway expects: what is cached on the others is not found.",
    "Make --shard I/N of the indexer and I/N=host:port of the gateway's --indexer agree.",
)

# Engines

ENGINE_UNREACHABLE = _error(
    "engine-unreachable",
    "Nothing answers at the HTTP address of a worker.",
    "Start the engine, or correct the http_endpoint that it is registered with. A host name must be known where the "
    "gateway runs.",
)
WORKER_FAILING = _error(
    "worker-failing",
    "A worker gets no requests for a while, because it fails what others run.",
    "Look at the engine's log. It is tried again by itself.",
)
MODEL_DIFFERS = _error(
    "model-differs",
    "A worker is registered for a model that its engine does not serve.",
    "Register it with the name that the engine serves (vLLM's --served-model-name), or start it with that name.",
)
BLOCK_SIZE_DIFFERS = _error(
    "block-size-differs",
    "A worker is registered with another block size than its engine has: none of its blocks is ever found.",
    "Register the engine's own (--block-size of vLLM, --page-size of SGLang), or start it with the registered one.",
)
RANKS_DIFFER = _error(
    "ranks-differ",
    "The data-parallel ranks of a worker are others than its engine has.",
    "Register dp_size, dp_start_rank and one event endpoint a rank as the engine has them: rank r publishes at its "
    "base port + r.",
)

# Events

EVENTS_UNREACHABLE = _error(
    "events-unreachable",
    "Nothing answers at the address where a worker's KV events are awaited: what it caches is not known.",
    "Correct the event endpoint, or start the engine with KV events; it must bind more than 127.0.0.1 to be reached "
    "from other machines. An engine that connects to its endpoint instead (vLLM does without `*` in it, the llm-d "
    "simulator always) is registered with `bind: true` and the address to be bound here; with `bind: true`, start the "
    "engine with this machine's address, and restart it if it does not connect again by itself.",
)
EVENTS_SILENT = _error(
    "events-silent",
    "A worker serves requests, and no event of it ever came: what it caches is not known.",
    "Start the engine with KV events (vLLM: --enable-prefix-caching and --kv-events-config with "
    "enable_kv_cache_events, SGLang: --kv-events-config), with the topic and port that are registered.",
)
EVENTS_MISCONFIGURED = _error(
    "events-misconfigured",
    "The events of a worker cannot be read as it is registered.",
    "Register an event endpoint for each rank, or the transport that its events come over; an indexer that reads NATS "
    "needs --nats-server. Where two publishers send, give each engine and each rank an endpoint of its own.",
)
EVENTS_UNREADABLE = _error(
    "events-unreadable",
    "The events of a worker cannot be decoded.",
    "Register the engine that it is (--engine), and see docs/event-transports.md for the formats that are read.",
)
LORA_UNNAMED = _error(
    "lora-unnamed",
    "Events carry numbers of LoRA adapters that nobody named: the blocks of these adapters are never found.",
    "Register the worker's adapters with the numbers that its engine gives them (adapters: name, lora_id).",
)
HISTORY_INCOMPLETE = _warning(
    "history-incomplete",
    "Events of a worker were lost for good, or left out at a limit of the index: some of what it caches is not known.",
    "What is known becomes whole as the engine's cache turns over; the worker counts as incomplete until its cache is "
    "cleared or a complete state of it is read. A replay endpoint, a bridge or an indexer's peers avoid it; against "
    "the limits see docs/index-limits.md.",
)
REPLAY_MISSING = _warning(
    "replay-missing",
    "A worker has no replay endpoint: events that are lost once are lost for good.",
    "Start vLLM with replay_endpoint in --kv-events-config, and register it.",
)
BLOCKS_ORPHANED = _warning(
    "blocks-orphaned",
    "Blocks of a worker hang below blocks that its events never named: no request finds them.",
    "Events were lost before it was read: `ResetWorker` of the indexer begins anew with what its replay socket has. If "
    "it stays, the engine names parents in a way that is not read: report it with its release.",
)
REMOVALS_LOST = _warning(
    "removals-lost",
    "A worker seems to hold more blocks than its cache has: events of removed blocks were lost.",
    "Correct total_kv_blocks if it is too low; else `ResetWorker` of the indexer begins anew with the worker.",
)

GROUPS_UNJUDGED = _note(
    "groups-unjudged",
    "A model has cache groups that events do not tell enough of, such as state-space layers: what these have dropped "
    "is not seen, and overlaps may be too long.",
    "Watch the worker's prediction error in `kvscout status`: it says how often that happens.",
)

# Whether what is predicted comes true

TOKENS_DIFFER = _error(
    "tokens-differ",
    "The gateway makes other tokens of a model's prompts than its engine: nothing that is cached is found.",
    "Give --tokenizer the folder of the very model that the engine runs, with its chat template.",
)
HASHES_NEVER_MATCH = _error(
    "hashes-never-match",
    "A worker has prompts cached of which nothing was ever found in its events.",
    "The engine hashes something else than the gateway: compare tokens (--tokenizer), cache salt, LoRA names and "
    "multimodal ids of requests and events; see docs/hashing.md.",
)
PREDICTIONS_WRONG = _warning(
    "predictions-wrong",
    "What a worker had cached is often not what was predicted.",
    "Events that lag, evictions in a cache that is too small, or an engine without prefix caching cause it: look at "
    "the worker's events in `kvscout status`.",
)
CACHED_TOKENS_UNTOLD = _warning(
    "cached-tokens-untold",
    "An engine does not tell how much of a prompt it had cached: hit rate and predictions cannot be checked.",
    "Start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report.",
)

# Replicas of the scheduler

REPLICAS_DIVERGED = _error(
    "replicas-diverged",
    "Replicas of the scheduler disagree about what is booked.",
    "They send each other snapshots by themselves. If it stays, restart the one that disagrees, and report it.",
)
REPLICAS_ALONE = _warning(
    "replicas-alone",
    "There are several schedulers, and one does not share its bookings: each knows only its own load.",
    "Start all with --router-replica-sync and the same --nats-server and --namespace, each with its own --replica-id.",
)
REPLICA_SILENT = _warning(
    "replica-silent",
    "A replica of the scheduler is not heard of any more.",
    "If it was stopped for good this passes; what it had booked ends with its leases. Else start it again.",
)

# The machines

CLOCKS_DIFFER = _warning(
    "clocks-differ",
    "The clock of a machine is wrong: a publisher that starts anew is told from its predecessor by it.",
    "Keep the clocks of all machines right by NTP.",
)
DESCRIPTORS_FEW = _warning(
    "descriptors-few",
    "A service may open few files, and each connection takes one.",
    "Raise its hard limit: LimitNOFILE= of systemd, `ulimit -Hn`, the container's ulimits.",
)
REFERENCE_BACKEND = _warning(
    "reference-backend",
    "A service runs without the native extension: its answers are the same, and slower.",
    "Install a wheel, or build the extension (`make native`); unset kvscout_NATIVE=0.",
)
VERSIONS_DIFFER = _warning(
    "versions-differ",
    "Services are of different releases.",
    "Fine during an upgrade; else bring all to the same one.",
)
SERVICE_WARNING = _warning(
    "service-warning",
    "A service says that something is not as it should be.",
    "Its own words say what.",
)

# What doctor could not see

OUT_OF_SIGHT = _note(
    "out-of-sight",
    "What the gateway reaches does not answer from here, so that it could not be asked.",
    "Run doctor where the gateway runs.",
)
UNTOLD = _note(
    "untold",
    "A service or engine did not tell all that it was asked.",
    "Give a token that may read it (--token-file), and bring the service to the release of this command.",
)
LEFT_OUT = _note(
    "left-out",
    "There are more services or engines than doctor asks.",
    "Ask about one tenant (--tenant), or one gateway at a time.",
)

CONDITIONS = tuple(value for value in globals().values() if isinstance(value, Condition))
"""All, in the order in which they are told among those of one severity."""
