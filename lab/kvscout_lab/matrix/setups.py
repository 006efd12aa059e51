"""The matrix: named cells, old and new, in which policies are held against each other. Data, and nothing else.

A *setup* is a workload, its clients, and a cluster; with a rate it is a cell. Rates are shares (*loads*) of that
at which `kv` saturates there (`matrix_rates`), or given. Names are GROUP/SETUP@LOAD, or GROUP/SETUP@RATE/s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Final

from kvscout_common.errors import ConfigError
from kvscout_lab.matrix.rates import SATURATED
from kvscout_lab.simulation.cluster import Cluster, Faults, Latencies
from kvscout_lab.simulation.known_engines import ENGINES
from kvscout_lab.simulation.timing import StepTime
from kvscout_lab.simulation.worker import EngineSettings
from kvscout_lab.workloads.clients import Clients
from kvscout_lab.workloads.generators import GENERATED
from kvscout_lab.workloads.workload import Burst

CONVERSATIONS, AGENTS, LONG_AGENTS, SHARED, DOCUMENTS, EMBEDDINGS, CODING_AGENTS, AGENTIC_CODE = GENERATED
TRACE: Final = "trace"
"""The workload of a file in Mooncake's format, which is not part of this repository."""
CHATS: Final = (CONVERSATIONS, AGENTS)
"""Workloads of most setups: many turns, and many that begin alike."""


EIGHT: Final = Cluster(workers=8)
PLAIN: Final = Clients()
"""Clients with default settings."""


WARM_UP: Final = {SHARED: 0.3}
"""Share of the requests that do not count, where it is not a tenth. Workers get their copies of the one prompt that all
share once in a cluster's life, one after the other; how that goes show the cells named `cold`."""


@dataclass(frozen=True, slots=True)
class Setup:
    """All of a cell but its rate."""

    name: str
    """GROUP/SETUP."""
    workload: str
    loads: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    """Flows a second, where no share of a saturated rate is meant."""
    clients: Clients = PLAIN
    cluster: Cluster = EIGHT
    requests: int = 1_400
    burst: Burst | None = None
    lead_seconds: float = 0.0
    shared_tokens: int = 8_192
    warm_up: float | None = None
    """Share of the requests that do not count; None = `WARM_UP` of the workload, or a tenth."""
    rates_of: str = ""
    """The setup whose saturated rate is taken, so that two get the same requests; "" = its own."""

    @property
    def uncounted(self) -> float:
        """Share of requests at the start that are left out of the results."""
        return WARM_UP.get(self.workload, 0.1) if self.warm_up is None else self.warm_up

    @property
    def saturated(self) -> float:
        """Flows a second at which `kv` saturates; 0 = nobody has looked."""
        return SATURATED.get(self.rates_of or self.name, 0.0)


@dataclass(frozen=True, slots=True)
class MatrixCell:
    """A setup at a rate."""

    name: str
    setup: Setup
    rate: float
    """Flows a second."""
    load: float | None
    """Share of the rate at which `kv` saturates."""


def matrix(*, pattern: str = "*", trace: bool = False) -> list[MatrixCell]:
    """Return the cells whose names match.

    Args:
        pattern: As of a shell: `*` stands for anything, `?` for one character.
        trace: There is a trace, for the cells that need one.

    Raises:
        ConfigError: None matches.
    """
    cells = [
        cell
        for setup in setups()
        if trace or setup.workload != TRACE
        for cell in _cells(setup)
        if fnmatchcase(cell.name, pattern)
    ]
    if not cells:
        raise ConfigError(f"no cell is named like {pattern!r}", field="cells")
    return cells


def _cells(setup: Setup) -> Iterator[MatrixCell]:
    for load in setup.loads:
        yield MatrixCell(f"{setup.name}@{load:.0%}", setup, round(load * setup.saturated, 6), load)
    for rate in setup.rates:
        yield MatrixCell(f"{setup.name}@{rate:g}/s", setup, rate, None)


def engine(name: str, kv_tokens: int = 0) -> EngineSettings:
    """Return a known engine.

    Args:
        name: Name in `ENGINES`.
        kv_tokens: 0 = what fits.
    """
    known = ENGINES[name]
    return EngineSettings(kv_tokens=kv_tokens or known.kv_tokens, step=known.step)


def with_kv(tokens: int) -> EngineSettings:
    """Return the default engine with another cache."""
    return EngineSettings(kv_tokens=tokens)


def setups() -> Iterator[Setup]:
    """Yield every setup, group by group."""
    yield from _old()
    yield from _clients()
    yield from _clusters()
    yield from _faults()
    yield from _engines()
    yield from _together()


def _old() -> Iterator[Setup]:
    """Yield the setups of workloads, numbers of workers and cache sizes."""
    for workload in (CONVERSATIONS, AGENTS, SHARED, TRACE):
        for workers, loads in ((4, (0.7, 0.95)), (8, (0.35, 0.5, 0.7, 0.85, 0.95))):
            requests = 2_800 if workload == SHARED else 1_400
            yield Setup(f"{workload}/{workers}w", workload, loads, cluster=Cluster(workers=workers), requests=requests)
            # One prompt that all share fits into any cache.
            for tokens in () if workload == SHARED else (300_000, 1_200_000):
                cluster = Cluster(workers=workers, engine=with_kv(tokens))
                yield Setup(f"{workload}/{workers}w-{tokens // 1_000}k", workload, (0.85,), cluster=cluster)
        yield Setup(f"{workload}/16w", workload, (0.7, 0.95), cluster=Cluster(workers=16), requests=2_800)
    small = Cluster(workers=4, engine=with_kv(16_384))
    yield Setup("documents/idle", DOCUMENTS, rates=(0.5,), cluster=small, requests=1_000)
    yield Setup("documents/4w", DOCUMENTS, (0.7, 0.95), cluster=small)
    yield Setup(
        "shared-32k/16w",
        SHARED,
        rates=(100.0, 200.0),
        shared_tokens=32_768,
        requests=4_000,
        cluster=Cluster(workers=16),
    )
    yield Setup(
        "shared-32k/warm-on-one-of-50",
        SHARED,
        rates=(60.0,),
        shared_tokens=32_768,
        lead_seconds=10.0,
        cluster=Cluster(workers=50),
        requests=2_000,
    )
    yield Setup("long-agents/8w", LONG_AGENTS, (0.5, 0.85), requests=1_000)
    # Sessions last for minutes: with fewer requests, the flows that overlap would be over before caches are full.
    yield Setup("coding-agents/8w", CODING_AGENTS, rates=(0.5, 0.8), requests=5_000)
    small = Cluster(workers=8, engine=with_kv(300_000))
    yield Setup("coding-agents/8w-300k", CODING_AGENTS, rates=(0.4,), cluster=small, requests=5_000)
    # A third of AIPerf's sessions a seed.
    yield Setup("agentic-code/8w", AGENTIC_CODE, rates=(0.05, 0.1), requests=1_600)
    yield Setup("agentic-code/8w-300k", AGENTIC_CODE, rates=(0.05,), cluster=small, requests=1_600)


def _clients() -> Iterator[Setup]:
    """Yield the setups of client settings."""
    for workload in CHATS:
        base = f"{workload}/8w"
        for what, clients in (
            ("4096", Clients(max_tokens=4_096)),
            ("32768", Clients(max_tokens=32_768)),
            ("usual", Clients(usual_max_tokens=True)),
        ):
            yield Setup(f"max-tokens/{workload}-{what}", workload, (0.5, 0.85), clients=clients, rates_of=base)
        for share in (0.3, 1.0):
            clients = Clients(unstreamed=share)
            yield Setup(f"unstreamed/{workload}-{share:.0%}", workload, (0.5, 0.85), clients=clients, rates_of=base)
        for sign in ("none", "class", "prompt"):
            clients = Clients(long_answers=0.3, sign=sign)
            loads = (0.35, 0.7, 0.95) if sign == "none" else (0.7,)
            name = f"long-answers/{workload}-sign-{sign}"
            yield Setup(name, workload, loads, clients=clients, rates_of=base)
        clients = Clients(classes=True)
        yield Setup(f"classes/{workload}", workload, (0.85,), clients=clients, rates_of=base)
        clients = Clients(adapters=8)
        yield Setup(
            f"lora/{workload}-8", workload, (0.7, 0.95), clients=clients, cluster=Cluster(workers=8, adapters=8)
        )
    clients = Clients(long_answers=0.3, usual_max_tokens=True)
    yield Setup(
        "long-answers/conversations-max-tokens",
        CONVERSATIONS,
        (0.35, 0.7),
        clients=clients,
        rates_of="conversations/8w",
    )
    clients = Clients(long_answers=0.3)
    yield Setup(
        "long-answers/shared-prompt", SHARED, (0.25,), clients=clients, requests=2_000, rates_of="shared-prompt/8w"
    )
    for workers in (16, 8):
        cluster = Cluster(workers=workers)
        yield Setup(f"embeddings/{workers}w", EMBEDDINGS, rates=(600.0, 1_200.0), cluster=cluster, requests=6_000)
    burst = Burst(5.0, 10.0)
    for workload in (*CHATS, SHARED):
        requests = 2_800 if workload == SHARED else 1_400
        name, base = f"bursts/{workload}", f"{workload}/8w"
        yield Setup(name, workload, (0.85, 1.1), burst=burst, requests=requests, rates_of=base)
    yield Setup("bursts/embeddings", EMBEDDINGS, rates=(600.0,), requests=6_000, burst=Burst(5.0, 2.0))


def _clusters() -> Iterator[Setup]:
    """Yield the setups of clusters: unequal workers, disaggregated prefill, several schedulers."""
    half = Cluster(workers=8, prefill_speeds=(2.5,) * 4, decode_speeds=(1.6,) * 4)
    for workload in CHATS:
        yield Setup(f"mixed/{workload}-half-are-faster", workload, (0.7, 0.95), cluster=half)
        cluster = Cluster(workers=8, decode_speeds=(1 / 3,))
        yield Setup(f"mixed/{workload}-one-decodes-3x-slower", workload, (0.7, 0.95), cluster=cluster)
        cluster = Cluster(workers=8, speeds=(0.3,))
        yield Setup(f"mixed/{workload}-one-is-slow", workload, (0.85,), cluster=cluster)
        cluster = Cluster(workers=6, prefill_workers=3)
        yield Setup(f"apart/{workload}-3+6", workload, (0.7, 0.95), cluster=cluster)
        cluster = replace(cluster, decode_speeds=(1 / 3,) * 2)
        yield Setup(f"apart/{workload}-3+6-slow-decoders", workload, (0.7,), cluster=cluster)
        cluster = Cluster(workers=8, replicas=4, gateways=8)
        yield Setup(f"replicas/{workload}-4", workload, (0.85,), cluster=cluster, rates_of=f"{workload}/8w")
    cluster = Cluster(workers=8, replicas=4, gateways=8, latencies=Latencies(sync_ms=200.0))
    yield Setup("replicas/conversations-4-late", CONVERSATIONS, (0.85,), cluster=cluster, rates_of="conversations/8w")


def _faults() -> Iterator[Setup]:
    """Yield the setups of faults and of cold starts."""
    for workload in CHATS:
        base = f"{workload}/8w"
        for what, loads, cluster in (
            ("restart-scheduler", (0.5, 0.85), Cluster(workers=8, gateways=4, faults=Faults(restart_scheduler=0.4))),
            ("restart-gateway", (0.85,), Cluster(workers=8, gateways=4, faults=Faults(restart_gateway=0.4))),
            ("recovering-worker", (0.85,), Cluster(workers=8, faults=Faults(recover_worker=0.4))),
            ("late-events", (0.85,), Cluster(workers=8, latencies=Latencies(event_ms=500.0))),
            ("lost-events", (0.85,), Cluster(workers=8, lost_events=0.05)),
        ):
            yield Setup(f"faults/{workload}-{what}", workload, loads, cluster=cluster, rates_of=base)
        for what, us, load in (("as-believed", 50.0, 0.7), ("8x-faster", 6.25, 1.4), ("5x-slower", 250.0, 0.15)):
            cluster = Cluster(workers=8, engine=EngineSettings(step=StepTime(prefill_us_per_token=us)))
            name = f"cold/{workload}-{what}"
            yield Setup(name, workload, (load,), cluster=cluster, requests=500, warm_up=0.0, rates_of=base)
        fast = EngineSettings(step=StepTime(prefill_us_per_token=6.25))
        cluster = Cluster(workers=8, gateways=4, engine=fast, faults=Faults(restart_scheduler=0.4))
        yield Setup(f"faults/{workload}-restart-fast-engines", workload, (1.4,), cluster=cluster, rates_of=base)
    name = "cold/shared-prompt-as-believed"
    yield Setup(name, SHARED, (0.5,), requests=700, warm_up=0.0, rates_of="shared-prompt/8w")


def _engines() -> Iterator[Setup]:
    """Engines that are not the policy's own formula."""
    for name, loads in (
        ("8b-bf16-h100", (0.5, 0.85)),
        ("70b-fp8-tp4-h100", (0.5, 0.85)),
        ("70b-bf16-tp8-h100", (0.7,)),
        ("235b-moe-fp8-tp8-h100", (0.7,)),
    ):
        for workload in (CONVERSATIONS, AGENTS, LONG_AGENTS):
            cluster = Cluster(workers=8, engine=engine(name))
            requests = 1_000 if workload == LONG_AGENTS else 1_400
            yield Setup(f"engines/{workload}-{name}", workload, loads, cluster=cluster, requests=requests)


def _together() -> Iterator[Setup]:
    """Yield the setups of all client settings at once, on known engines."""
    clients = Clients(usual_max_tokens=True, unstreamed=0.3, long_answers=0.2)
    for workload in CHATS:
        for name in ("8b-bf16-h100", "70b-fp8-tp4-h100"):
            cluster = Cluster(workers=8, engine=engine(name), gateways=4)
            yield Setup(f"together/{workload}-{name}", workload, (0.5, 0.85), clients=clients, cluster=cluster)
