"""Rungs and losses as metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvscout_common.http.dialect import Usage
from kvscout_common.registry.registry import Registry
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_gateway.ladder.ladders import Ladders
from kvscout_gateway.ladder.metrics import LadderMetrics
from kvscout_gateway.members.catalog import Catalog
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.prompt import Geometry, Prompt
from kvscout_gateway.values.request import Request

POOL = Geometry(16, eagle=False)
BLOCKS = 10


class World:
    """One model, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        registry = Registry(lambda: self.now)
        catalog = Catalog(registry)
        registry.register(WorkerSpec("w0", model="m", block_size=16, total_kv_blocks=1_000))
        self.ladders = Ladders(catalog, lambda *_: True, clock=lambda: self.now)
        self.metrics = CollectorRegistry()
        self.metrics.register(LadderMetrics(self.ladders))

    def run(
        self,
        *,
        held: int | None,
        chosen: int,
        cached: int,
        degraded: tuple[str, ...] = (),
        saved: float = 0.0,
        counted: int = 16 * BLOCKS + 1,
    ) -> None:
        """One request with always the same prompt."""
        tokens = 16 * BLOCKS + 1
        prompt = Prompt(tokens, given_hashes=bytes(range(8 * BLOCKS)), given_block_size=16)
        decision = Decision("default", "m", WorkerRank("w0", 0), POOL, prompt.given_hashes, degraded=degraded)
        decision.held_blocks, decision.overlap_blocks, decision.saved_seconds = held, chosen, saved
        placed = self.ladders.placed(Request("m", "default", prompt), decision)
        self.ladders.ended(placed, Usage(counted, cached, 1), "w0")

    def saved(self) -> float | None:
        return self.metrics.get_sample_value("kvscout_ladder_saved_seconds", {"tenant": "default", "model": "m"})

    def lost(self, loss: str) -> float | None:
        labels = {"tenant": "default", "model": "m", "loss": loss}
        return self.metrics.get_sample_value("kvscout_ladder_lost_tokens", labels)

    def rung(self, rung: str) -> float | None:
        labels = {"tenant": "default", "model": "m", "rung": rung}
        return self.metrics.get_sample_value("kvscout_ladder_tokens", labels)


def test_each_token_of_a_prompt_is_cached_or_lost_once() -> None:
    world = World()
    world.run(held=0, chosen=0, cached=0)
    world.run(held=BLOCKS, chosen=6, cached=64)
    assert (world.rung("prompt"), world.rung("ideal")) == (322, 160)
    assert (world.rung("routing"), world.rung("predicted"), world.rung("actual")) == (160, 96, 64)
    assert (world.lost("never_seen"), world.lost("moved"), world.lost("not_there")) == (162, 64, 32)


def test_what_a_move_away_from_the_holder_saved_is_told_beside_what_it_lost() -> None:
    world = World()
    world.run(held=BLOCKS, chosen=6, cached=96, saved=0.25)
    world.run(held=BLOCKS, chosen=BLOCKS, cached=160, saved=0.0)
    world.run(held=BLOCKS, chosen=8, cached=128, saved=0.5)
    assert world.lost("moved") == 64 + 32
    assert world.saved() == 0.75


def test_where_the_engine_counts_other_tokens_nothing_else_is_to_blame() -> None:
    world = World()
    world.run(held=BLOCKS, chosen=6, cached=48, saved=0.25, counted=150)
    assert (world.rung("routing"), world.rung("predicted"), world.rung("actual")) == (150, 48, 48)
    assert world.lost("other_tokens") == 150 - 48
    assert (world.lost("not_placed"), world.lost("moved"), world.saved()) == (0, 0, 0.0)


def test_without_an_indexer_what_caches_could_have_kept_is_not_placed() -> None:
    world = World()
    world.run(held=0, chosen=0, cached=0)
    world.run(held=None, chosen=0, cached=48, degraded=("indexer does not answer",))
    assert (world.rung("routing"), world.rung("predicted"), world.rung("actual")) == (160, 48, 48)
    assert world.lost("not_placed") == 112


def test_what_is_older_than_the_window_counts_no_more() -> None:
    world = World()
    world.run(held=0, chosen=0, cached=0)
    world.now = 400.0
    assert world.rung("prompt") is None
    world.run(held=BLOCKS, chosen=BLOCKS, cached=160)
    assert world.rung("actual") == 160
    assert world.lost("moved") == 0
