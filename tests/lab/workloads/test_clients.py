"""What clients bring: bounds, whole answers, long ones, adapters; and that prompts and times stay what they are."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from support.laboratory_worlds import ENGINE, SIZE, mixed, simulation
from support.scheduler_invariants import check_idle
from support.seeds import test_seed

from kvscout_common.errors import ConfigError
from kvscout_common.worker import Role
from kvscout_lab.simulation.cluster import Cluster
from kvscout_lab.simulation.router import PlacementRequest, Replica
from kvscout_lab.workloads.clients import USUAL_MAX_TOKENS, Clients, as_clients_ask
from kvscout_lab.workloads.generators import Embeddings, conversations, embeddings
from kvscout_lab.workloads.workload import Turn, Workload


def turns(workload: Workload) -> list[Turn]:
    return [turn for flow in workload.flows for turn in flow.turns]


def test_a_bound_is_what_was_set_and_never_below_the_output() -> None:
    plain = mixed(test_seed(), 200)
    for made, before in zip(turns(as_clients_ask(plain, Clients(max_tokens=32))), turns(plain), strict=True):
        assert made._replace(max_tokens=0) == before
        assert made.max_tokens >= max(32, made.output_tokens)
        assert made.max_tokens == 32 or made.max_tokens < 2 * made.output_tokens


def test_usual_bounds_are_drawn_and_none_is_below_the_output() -> None:
    workload = as_clients_ask(conversations(150, test_seed()), Clients(usual_max_tokens=True))
    values = [turn.max_tokens for turn in turns(workload)]
    assert set(values) == {value for value, _ in USUAL_MAX_TOKENS}
    assert all(turn.max_tokens >= turn.output_tokens for turn in turns(workload) if turn.max_tokens)


@pytest.mark.parametrize("sign", ["none", "class", "prompt"])
def test_long_answers_are_a_share_and_later_prompts_contain_them(sign: str) -> None:
    plain = conversations(200, test_seed())
    made = as_clients_ask(plain, Clients(long_answers=0.3, sign=sign))  # type: ignore[arg-type]  # one of them
    long = [turn.output_tokens > 600 for turn in turns(made)]
    assert 0.2 < sum(long) / len(long) < 0.4
    if sign == "class":
        assert [turn.output_class == "long" for turn in turns(made)] == long
    for flow, before in zip(made.flows, plain.flows, strict=True):
        if sign == "prompt":
            assert len({turn.output_tokens > 600 for turn in flow.turns}) == 1
        for (now, then), (old, new) in zip(pairwise(flow.turns), pairwise(before.turns), strict=True):
            said = new.prompt_tokens - old.prompt_tokens - old.output_tokens
            assert then.prompt_tokens == now.prompt_tokens + now.output_tokens + said
            assert then.nodes[: len(now.nodes)] == now.nodes
        for turn in flow.turns:
            assert len(turn.nodes) == (turn.prompt_tokens + turn.output_tokens) // plain.block_size
    # What is generated is nobody else's.
    owners: dict[int, int] = {}
    for number, flow in enumerate(made.flows):
        for node in flow.turns[-1].nodes[flow.turns[0].prompt_tokens // plain.block_size :]:
            assert owners.setdefault(node, number) == number


def test_prompts_of_one_beginning_are_of_one_class() -> None:
    workload = as_clients_ask(conversations(50, test_seed()), Clients(classes=True))
    assert 1 < len({turn.output_class for turn in turns(workload)}) <= 16
    assert all(len({turn.output_class for turn in flow.turns}) == 1 for flow in workload.flows)


def test_adapters_share_nothing_and_run_where_they_are_loaded() -> None:
    workload = as_clients_ask(mixed(test_seed(), 150), Clients(adapters=3))
    of: dict[int, int] = {}
    for turn in turns(workload):
        for node in turn.nodes:
            assert of.setdefault(node, turn.adapter) == turn.adapter
    run = simulation(workload, "kv-time", Cluster(workers=4, engine=ENGINE, adapters=3)).run()
    for record in run.records:
        assert not (record.worker + workload.flows[record.flow].turns[record.turn].adapter - 1) % 2


@pytest.mark.parametrize("prefill_workers", [0, 2])
def test_of_an_answer_that_comes_as_a_whole_nobody_reports_a_first_token(
    monkeypatch: pytest.MonkeyPatch, prefill_workers: int
) -> None:
    told: set[str] = set()
    asked: dict[str, bool] = {}
    place, first_token = Replica.place, Replica.first_token

    def placed(self: Replica, ask: PlacementRequest, *rest: object) -> None:
        if ask.role is not Role.PREFILL:
            asked[ask.request_id] = ask.estimates_prefill
        else:
            assert not ask.estimates_prefill
        place(self, ask, *rest)  # type: ignore[arg-type]  # as it was called

    def reported(self: Replica, request_id: str, role: Role) -> None:
        told.add(request_id)
        first_token(self, request_id, role)

    monkeypatch.setattr(Replica, "place", placed)
    monkeypatch.setattr(Replica, "first_token", reported)
    workload = as_clients_ask(mixed(test_seed(), 150), Clients(unstreamed=0.4))
    cluster = Cluster(workers=3, prefill_workers=prefill_workers, engine=ENGINE)
    made = simulation(workload, "kv-time", cluster)
    run = made.run()
    check_idle(made)
    assert {request for request, whole in asked.items() if whole}.isdisjoint(told)
    assert 0.25 < sum(asked.values()) / len(asked) < 0.55
    assert all(record.first_token > 0 for record in run.records)


@pytest.mark.parametrize("expects", [False, True])
def test_gateways_say_a_bound_as_a_bound_or_as_an_expectation(monkeypatch: pytest.MonkeyPatch, expects: bool) -> None:
    said: set[tuple[int, int]] = set()
    place = Replica.place

    def placed(self: Replica, ask: PlacementRequest, *rest: object) -> None:
        said.add((ask.expected_output_tokens, ask.max_output_tokens))
        place(self, ask, *rest)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(Replica, "place", placed)
    workload = as_clients_ask(mixed(test_seed(), 60), Clients(max_tokens=4_096))
    simulation(workload, "kv-time", Cluster(workers=3, engine=ENGINE, expects_max_tokens=expects)).run()
    assert said == ({(4_096, 0)} if expects else {(0, 4_096)})


def test_embeddings_end_without_a_token_of_output(monkeypatch: pytest.MonkeyPatch) -> None:
    told: set[int] = set()
    ended = Replica.ended

    def noted(self: Replica, request_id: str, role: Role, output_tokens: int) -> None:
        told.add(output_tokens)
        ended(self, request_id, role, output_tokens)

    monkeypatch.setattr(Replica, "ended", noted)
    workload = embeddings(Embeddings(requests=200, seed=test_seed()))
    made = simulation(workload, "kv-time", Cluster(workers=2, engine=replace(ENGINE, block_size=SIZE, kv_tokens=8_192)))
    run = made.run()
    check_idle(made)
    assert all(record.first_token == record.finished > 0 for record in run.records)
    assert not run.gaps.counts
    assert told == {0}
    assert {turn.output_tokens for turn in turns(as_clients_ask(workload, Clients(long_answers=0.5)))} == {0}


@pytest.mark.parametrize(
    ("field", "clients"),
    [
        ("max_tokens", Clients(max_tokens=-1)),
        ("max_tokens", Clients(max_tokens=1, usual_max_tokens=True)),
        ("unstreamed", Clients(unstreamed=1.5)),
        ("long_answers", Clients(long_answers=-0.1)),
        ("adapters", Clients(adapters=-1)),
        ("sign", Clients(sign="colour")),  # type: ignore[arg-type]  # that is what is wrong
    ],
)
def test_clients_out_of_range_are_refused_with_the_field(field: str, clients: Clients) -> None:
    with pytest.raises(ConfigError) as raised:
        as_clients_ask(mixed(1, 5), clients)
    assert raised.value.field == field
