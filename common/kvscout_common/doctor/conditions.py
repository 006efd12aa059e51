"""Conditions that doctor can report, with their meaning and remedy, in order of report."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_SUBJECT: Final = re.compile(r"\ban? (?:worker|engine|service|policy)\b", re.IGNORECASE)


class Severity(StrEnum):
    """Severity of a condition."""

    ERROR = "error"
    """Routing is blind or wrong, or a part of the deployment is missing."""
    WARNING = "warning"
    """Routing is degraded, or will be after the next fault."""
    NOTE = "note"
    """Doctor could not check something."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that doctor can report."""

    id: str
    severity: Severity
    what: str
    """One sentence."""
    remedy: str

    def what_of(self, subject: str) -> str:
        """Return the sentence with a name, such as "worker vllm-0", for "a worker"; "" = as it is."""
        if not subject:
            return self.what
        named = _SUBJECT.sub(lambda _: subject, self.what, count=1)
        return named[0].upper() + named[1:]


def _error(name: str, what: str, remedy: str) -> Condition:
    return Condition(name, Severity.ERROR, what, remedy)


def _warning(name: str, what: str, remedy: str) -> Condition:
    return Condition(name, Severity.WARNING, what, remedy)


def _note(name: str, what: str, remedy: str) -> Condition:
    return Condition(name, Severity.NOTE, what, remedy)


# Services

SERVICE_UNREACHABLE = _error(
    "service-unreachable",
    "A service does not answer at its address.",
    "Start the service, or correct the address in --gateway, --indexer, --scheduler, --envoy-admin or a bridge's "
    "--advertise. With TLS or tokens on, give --tls-ca and --token-file.",
)
WRONG_SERVICE = _error(
    "wrong-service",
    "An address belongs to a different kind of service than configured.",
    "Correct the addresses: by default indexers listen on 7051, schedulers on 7052, bridges on 7053.",
)
HELPER_FAILING = _warning(
    "helper-failing",
    "A gateway's last call to an indexer or scheduler failed: until one succeeds, it routes with incomplete "
    "information.",
    "Check the log and load of that service. If it is only slow, raise --indexer-timeout-ms or --scheduler-timeout-ms.",
)
NOT_SERVING = _warning(
    "not-serving",
    "A service answers but does not accept calls.",
    "A starting service waits for its workers, NATS and peers, for at most a minute; a draining one exits by itself.",
)

# Policies

POLICY_FAILING = _error(
    "policy-failing",
    "A policy raises, or answers what cannot be: the default policy (kv-time) decides in its place.",
    "Correct the policy; the scheduler's log has the traceback. Until then name another one with --router-mode.",
)

# The proxy in front of the engines

PROXY_OVERFLOW = _warning(
    "proxy-overflow",
    "An Envoy refused requests or retries, or queued them for a connection, at the limits of its circuit breakers.",
    "Raise the thresholds of the cluster's circuit_breakers, as in deploy/envoy/envoy.yaml: Envoy's defaults allow 3 "
    "retries and 1,024 requests.",
)
PICKER_BYPASSED = _warning(
    "picker-bypassed",
    "Requests bypassed the endpoint picker, placed round-robin and without a booking, because an Envoy could not "
    "reach it.",
    "Expected while no picker runs. Otherwise check the picker's load and log, Envoy's message_timeout, and the "
    "circuit_breakers of the picker's cluster.",
)

# NATS

NATS_UNREACHABLE = _error(
    "nats-unreachable",
    "A service is not connected to NATS: it misses registrations, events and replica updates sent over it.",
    "Start NATS, or correct --nats-server, --nats-credentials and --nats-ca. The service reconnects by itself.",
)
NATS_WITHOUT_JETSTREAM = _error(
    "nats-without-jetstream",
    "NATS runs without JetStream, which stores registrations, streams and snapshots.",
    "Start nats-server with -js (or `jetstream {}` in its configuration), or enable JetStream for the account.",
)
NATS_NAMESPACES_DIFFER = _error(
    "nats-namespaces-differ",
    "Services of one deployment have different --namespace values, so they do not see each other in NATS.",
    "Give all of them, including bridges and publishers, the same --namespace.",
)
NATS_CLUSTERS_DIFFER = _warning(
    "nats-clusters-differ",
    "Services are connected to different NATS servers.",
    "Give all of them the same --nats-server, unless the servers are joined by gateways or leaf nodes.",
)

# Worker registrations

NO_WORKERS = _error(
    "no-workers",
    "A gateway has no workers: every request is refused.",
    "Register workers: --workers-file, --workers-k8s, --workers-dns, `kvscout workers register`, or a bridge in the "
    "same NATS namespace.",
)
SCHEDULER_WITHOUT_WORKERS = _error(
    "scheduler-without-workers",
    "A scheduler knows none of its gateway's workers, so it cannot select any.",
    "The gateway sends them as soon as it reaches the scheduler. With NATS, give both the same --nats-server and "
    "--namespace.",
)
REGISTRATIONS_DIFFER = _error(
    "registrations-differ",
    "A gateway and its indexers or schedulers have different workers, or different registrations of the same workers.",
    "Normal for a moment after a change. Otherwise give all of them the same registry: one NATS namespace, or one "
    "workers file.",
)
TENANTS_SHARE_ENGINE = _warning(
    "tenants-share-engine",
    "Workers of several tenants are the same engine and share its cache: from overlaps, usage and times to first "
    "token, each tenant can infer which prefixes the others have sent.",
    "Give each tenant separate engines, or have each tenant's requests carry a distinct cache_salt.",
)
SHARDS_DIFFER = _error(
    "shards-differ",
    "An indexer holds a different shard of the workers than its gateway expects: prefixes cached on the other workers "
    "are not found.",
    "Make --shard I/N of the indexer match I/N=host:port of the gateway's --indexer.",
)

# Engines

ENGINE_UNREACHABLE = _error(
    "engine-unreachable",
    "Nothing answers at the HTTP address of a worker: it gets no requests.",
    "Start the engine, restart it if it hangs, or correct its registered http_endpoint. The gateway's host must be "
    "able to resolve the host name.",
)
ENGINE_SUSPECTED = _error(
    "engine-suspected",
    "An engine may be down or hang; it is left out of routing as soon as that is certain, within seconds.",
    "Check that the engine's process runs, and its log. If it is only restarting, nothing has to be done.",
)
WORKER_FAILING = _error(
    "worker-failing",
    "A worker is in cool-down: it fails requests that other workers serve.",
    "Check the engine's log. The worker is retried automatically.",
)
WORKER_SLOW = _warning(
    "worker-slow",
    "A worker takes several times as long for a token as the other workers of its model and role.",
    "Check the engine's log and what else uses its machine: a throttled GPU, swapping, another process. `kvscout "
    "workers drain WORKER` takes it out.",
)
MODEL_DIFFERS = _error(
    "model-differs",
    "A worker is registered for a model that its engine does not serve.",
    "Register it with the name that the engine serves (vLLM's --served-model-name), or start the engine with the "
    "registered name.",
)
BLOCK_SIZE_DIFFERS = _error(
    "block-size-differs",
    "A worker is registered with a different block size than its engine uses: none of its blocks is ever found.",
    "Register the engine's block size (vLLM's --block-size, SGLang's --page-size), or start the engine with the "
    "registered one.",
)
RANKS_DIFFER = _error(
    "ranks-differ",
    "A worker's registered data-parallel ranks differ from its engine's.",
    "Register the engine's dp_size, dp_start_rank and one event endpoint per rank: rank r publishes at base port + r.",
)

# Events

EVENTS_UNREACHABLE = _error(
    "events-unreachable",
    "Nothing answers at a worker's event endpoint: its cached blocks are unknown.",
    "Correct the event endpoint, or start the engine with KV events; it must bind more than 127.0.0.1 to be reachable "
    "from other machines. If the engine connects to its endpoint instead (vLLM does without `*` in it, the llm-d "
    "simulator always), register `bind: true` and the local address to bind; then start the engine with this "
    "machine's address, and restart it if it does not reconnect by itself.",
)
EVENTS_SILENT = _error(
    "events-silent",
    "A worker serves requests, but its events do not arrive: its cached blocks are unknown.",
    "Start the engine with KV events (vLLM: --enable-prefix-caching and --kv-events-config with "
    "enable_kv_cache_events, SGLang: --kv-events-config, TensorRT-LLM: kv_events_config), using the registered topic "
    "and port.",
)
EVENTS_MISCONFIGURED = _error(
    "events-misconfigured",
    "A worker's events cannot be read with its registration.",
    "Register an event endpoint for each rank, or the transport that carries its events; an indexer that reads from "
    "NATS needs --nats-server. If two publishers share an endpoint, give each engine and each rank a separate one. An "
    "engine that is served over gRPC needs its KV events switched on, and a server that has SubscribeKvEvents.",
)
EVENTS_UNREADABLE = _error(
    "events-unreadable",
    "A worker's events cannot be decoded.",
    "Register the correct engine (--engine); docs/event-transports.md lists the supported formats.",
)
LORA_UNNAMED = _error(
    "lora-unnamed",
    "Events refer to LoRA adapters by numbers that are not registered: blocks of these adapters are never found.",
    "Register the worker's adapters with the engine's numbers (adapters: name, lora_id).",
)
HISTORY_INCOMPLETE = _warning(
    "history-incomplete",
    "Events of a worker were permanently lost, or dropped at a limit of the index: some of its cached blocks are "
    "unknown.",
    "The index becomes complete as the engine's cache turns over; the worker is marked incomplete until its cache is "
    "cleared or its complete state is read. A replay endpoint, a bridge or indexer peers prevent losses; for the "
    "limits see docs/index-limits.md.",
)
CACHE_EMPTIED = _warning(
    "cache-emptied",
    "A worker's engine emptied its cache without an event: it computed prompts again that its events announced as "
    "cached, and no event had removed them.",
    "Blocks from before that do not count any more; the worker is complete again when its reports agree with the later "
    "events. If it happens often, find what empties the cache (sleep mode, /reset_prefix_cache, a weight update), and "
    "publish an event then: AllBlocksCleared.",
)
REPLAY_MISSING = _warning(
    "replay-missing",
    "A worker has no replay endpoint: lost events cannot be recovered.",
    "Start the engine with replay_endpoint in its configuration of KV events, and register it.",
)
BLOCKS_ORPHANED = _warning(
    "blocks-orphaned",
    "A worker's blocks have parents that never appeared in its events: no request finds them.",
    "Events before the subscription were lost: `ResetWorker` of the indexer starts over from the replay socket. If "
    "the problem stays, the engine names parents in an unsupported way: report it with the engine's release.",
)
REMOVALS_LOST = _warning(
    "removals-lost",
    "A worker appears to hold more blocks than its cache has: removal events were lost.",
    "Correct total_kv_blocks if it is too low; otherwise `ResetWorker` of the indexer starts over with the worker.",
)

GROUPS_UNJUDGED = _note(
    "groups-unjudged",
    "A model has cache groups that events do not fully describe, such as chunked local attention: evictions in them "
    "are not visible, so overlaps may be too long.",
    "Watch the worker's prediction error in `kvscout status`: it shows how often that happens.",
)

SCOPES_UNTOLD = _note(
    "scopes-untold",
    "The events of TensorRT-LLM do not say which LoRA adapter or cache salt a block belongs to: requests with one "
    "never match, and a plain request may match a block of theirs.",
    "Without adapters and salts nothing is wrong. With them, watch the worker's prediction error in `kvscout status`, "
    "or run the adapters on workers of their own.",
)

# Predictions

TOKENS_DIFFER = _error(
    "tokens-differ",
    "The gateway tokenizes a model's prompts differently from its engine: no cached prefix is found.",
    "Point --tokenizer at the folder of exactly the model that the engine runs, including its chat template, or "
    "--renderer at a vLLM renderer of the same release.",
)
HASHES_NEVER_MATCH = _error(
    "hashes-never-match",
    "A worker reports cached tokens, but none of its events ever matched a prompt.",
    "Engine and gateway hash different inputs: compare tokens (--tokenizer), cache salt, LoRA names and multimodal "
    "ids of requests and events; see docs/hashing.md.",
)
PREDICTIONS_WRONG = _warning(
    "predictions-wrong",
    "A worker's cached tokens often differ from the prediction.",
    "Possible causes are lagging events, evictions from a cache that is too small, or an engine without prefix "
    "caching: check the worker's events in `kvscout status`.",
)
HIT_RATE_LOW = _note(
    "hit-rate-low",
    "Few of the prompt tokens that could be cached are: the largest loss is named.",
    "`kvscout why` shows every loss; docs/why.md says what helps.",
)
CACHED_TOKENS_UNTOLD = _warning(
    "cached-tokens-untold",
    "An engine does not report cached prompt tokens: hit rate and predictions cannot be verified.",
    "Start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report.",
)

# Requests

REQUESTS_FAILING = _error(
    "requests-failing",
    "Engines fail requests, and no other worker runs them.",
    "`kvscout failures --whose engine` lists them with their workers; the engines' logs say why.",
)
REQUESTS_UNSERVED = _error(
    "requests-unserved",
    "Requests are refused because no worker can take them.",
    "`kvscout workers list` shows which workers drain, cool down or do not answer; start or register others.",
)
GATEWAY_FAILING = _error(
    "gateway-failing",
    "A gateway itself fails requests: it has no descriptors or memory left, or a defect.",
    "See its log. Raise its limit of open files, or --request-memory-bytes, if that is what is missing; report a "
    "defect.",
)
REQUESTS_REFUSED = _warning(
    "requests-refused",
    "Requests are refused because workers or limits are full, or because their deadlines or targets cannot be kept.",
    "Add workers, or allow more: --active-decode-blocks-threshold and --active-prefill-tokens-threshold (busy), "
    "--router-queue-limit and --queue-wait-seconds (queue), --max-in-flight.",
)
TENANT_LIMITED = _warning(
    "tenant-limited",
    "Requests of tenants are refused at the limits of the tokens file.",
    "Raise their limits there, or have their clients send fewer requests at once.",
)
TOKENS_LATE = _warning(
    "tokens-late",
    "A source of tokens is slow or does not answer: prompts that no other source tokenizes are placed by load alone.",
    "Give the gateway the model's --tokenizer, which needs no call; else relieve the renderer or the engines, or raise "
    "--tokenize-timeout-ms.",
)
REQUESTS_DEGRADED = _warning(
    "requests-degraded",
    "Requests are placed with less knowledge than usual: they find fewer of their cached prefixes.",
    "`kvscout failures --answered` lists them with their reasons. Without tokens: see whether the engines that "
    "tokenize are up, or give the gateway the model's --tokenizer. Without scheduler or indexer: check that service's "
    "log and load.",
)

# Replicas of the scheduler

REPLICAS_DIVERGED = _error(
    "replicas-diverged",
    "Replicas of the scheduler disagree about bookings.",
    "They exchange snapshots automatically. If it persists, restart the diverging replica, and report it.",
)
REPLICAS_ALONE = _warning(
    "replicas-alone",
    "There are several schedulers, but one does not share its bookings: each sees only its own load.",
    "Start all with --router-replica-sync and the same --nats-server and --namespace, each with a distinct "
    "--replica-id.",
)
REPLICA_SILENT = _warning(
    "replica-silent",
    "A replica of the scheduler has stopped sending.",
    "If it was removed on purpose, this clears by itself: bookings of gateways that are gone, too, end within 12 s, "
    "others with their leases. Otherwise restart it.",
)

# The machines

CLOCKS_DIFFER = _warning(
    "clocks-differ",
    "A machine's clock is wrong: restarted publishers are distinguished from their predecessors by time.",
    "Synchronize the clocks of all machines by NTP.",
)
DESCRIPTORS_FEW = _warning(
    "descriptors-few",
    "A service has a low limit of open files; each connection uses one.",
    "Raise its hard limit: systemd's LimitNOFILE=, `ulimit -Hn`, the container's ulimits.",
)
REFERENCE_BACKEND = _warning(
    "reference-backend",
    "A service runs without the native extension: same answers, but slower.",
    "Install a wheel, or build the extension (`make native`); unset KVSCOUT_NATIVE=0.",
)
VERSIONS_DIFFER = _warning(
    "versions-differ",
    "Services run different releases.",
    "Expected during an upgrade; otherwise bring all to the same release.",
)
SERVICE_WARNING = _warning(
    "service-warning",
    "A service reports a warning.",
    "See the text of the warning.",
)

# What has just begun, and what doctor could not check

STARTING = _note(
    "starting",
    "Something has just been started or registered, and is not complete.",
    "Wait: what lasts longer than 10 seconds is reported with its remedy.",
)

OUT_OF_SIGHT = _note(
    "out-of-sight",
    "An address that the gateway uses is not reachable from here, so it was not checked.",
    "Run doctor on the gateway's host.",
)
UNTOLD = _note(
    "untold",
    "A service or engine did not return everything requested.",
    "Give a token with the required role (--token-file), and upgrade the service to the release of this command.",
)
LEFT_OUT = _note(
    "left-out",
    "There are more services or engines than doctor checks.",
    "Check one tenant (--tenant), or one gateway at a time.",
)

CONDITIONS = tuple(value for value in globals().values() if isinstance(value, Condition))
"""All conditions, in their order of report within one severity."""
YOUNG_SECONDS = 10.0
"""Time that services and workers have to find each other."""
PASSING = frozenset(
    {
        HELPER_FAILING,
        NOT_SERVING,
        NO_WORKERS,
        SCHEDULER_WITHOUT_WORKERS,
        REGISTRATIONS_DIFFER,
        EVENTS_UNREACHABLE,
    }
)
"""Conditions that are normal for so long after a start."""
