"""What the laboratory asks: traces, sessions and generators as chains of nodes, and when they are due."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from support.laboratory_worlds import mixed
from support.seeds import test_seed

from kvscout_common.errors import ConfigError
from kvscout_lab.cells.bound import lower_bound
from kvscout_lab.simulation.cluster import Cluster
from kvscout_lab.simulation.index import LateIndex
from kvscout_lab.simulation.worker import EngineSettings
from kvscout_lab.workloads.generators import (
    Agents,
    CodingAgents,
    Documents,
    SharedPrompt,
    agentic_code,
    agents,
    coding_agents,
    conversations,
    documents,
    shared_prompt,
)
from kvscout_lab.workloads.sessions import MultiTurn, multi_turn
from kvscout_lab.workloads.trace import TraceRequest
from kvscout_lab.workloads.workload import Burst, Workload, at_rate, from_sessions, from_trace, in_bursts, led


def test_requests_of_a_trace_share_the_whole_blocks_that_their_hash_ids_share() -> None:
    made = from_trace(
        "t",
        [
            TraceRequest(1000, 1_500, 10, (0, 1, 2)),
            TraceRequest(1500, 1_536, 600, (0, 1, 2)),
            TraceRequest(2500, 1_024, 1, (0, 7)),
        ],
    )
    first, second, third = (flow.turns[0] for flow in made.flows)
    assert [flow.start_seconds for flow in made.flows] == [0.0, 0.5, 1.5]
    # 1,500 tokens are two blocks and a part of one; what is generated is nobody else's.
    assert list(first.nodes[:2]) == list(second.nodes[:2])
    assert (len(first.nodes), len(second.nodes), len(third.nodes)) == (2, 4, 2)
    assert third.nodes[0] == first.nodes[0]
    assert third.nodes[1] not in second.nodes


def test_equal_hash_ids_behind_different_ones_are_different_prefixes() -> None:
    made = from_trace("t", [TraceRequest(0, 1_024, 1, (0, 5)), TraceRequest(0, 1_024, 1, (1, 5))])
    assert not set(made.flows[0].turns[0].nodes) & set(made.flows[1].turns[0].nodes)


def test_later_turns_of_a_traced_session_begin_with_all_that_was_said() -> None:
    made = from_trace(
        "t",
        [
            TraceRequest(1000, 1_024, 500, (0, 1), "a"),
            TraceRequest(1000, 600, 10, (2, 3), "a", 2_500.0),
            TraceRequest(1000, 1_024, 500, (0, 1), "b"),
        ],
    )
    one, two = made.flows
    first, second = one.turns
    assert (second.prompt_tokens, second.think_seconds) == (1_024 + 500 + 600, 2.5)
    assert second.nodes[: len(first.nodes)] == first.nodes
    assert len(second.nodes) == (1_024 + 500 + 600 + 10) // 512
    assert set(first.nodes) & set(two.turns[0].nodes) == set(first.nodes[:2])


def test_flows_that_begin_at_once_arrive_at_the_rate_that_is_asked_for() -> None:
    made = from_trace("t", [TraceRequest(0, 600, 1, (0, number)) for number in range(400)])
    assert at_rate(made, 2.0).flow_rate == pytest.approx(2.0, rel=0.2)
    assert at_rate(made, 2.0, seed=1) != at_rate(made, 2.0, seed=2)


def test_sessions_that_aiperf_made_share_instructions_and_seeds_have_other_sessions() -> None:
    one, two = agentic_code(800, 0), agentic_code(800, 1)
    assert one.requests == two.requests == 800
    assert len({flow.turns[0].nodes[:60].tobytes() for flow in one.flows}) == 1
    assert max(flow.turns[-1].prompt_tokens for flow in one.flows) < 200_000
    assert {flow.turns[0].prompt_tokens for flow in one.flows} != {flow.turns[0].prompt_tokens for flow in two.flows}


def test_a_conversation_repeats_all_that_was_said_and_apps_share_their_system_prompt() -> None:
    parameters = MultiTurn(sessions=30, apps=1, seed=test_seed() % 1000)
    made = from_sessions("s", multi_turn(parameters), 16)
    chains = [flow.turns for flow in made.flows]
    for turns in chains:
        for before, after in pairwise(turns):
            assert list(after.nodes[: len(before.nodes)]) == list(before.nodes)
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
        assert len(turns[-1].nodes) == (turns[-1].prompt_tokens + turns[-1].output_tokens) // 16
    shared = set(chains[0][0].nodes) & set(chains[1][0].nodes)
    assert shared == set(chains[0][0].nodes[: len(shared)])
    assert len(shared) >= 64 // 16


def test_generated_agents_resemble_what_is_published_of_tool_traces() -> None:
    made = agents(Agents(sessions=1_200))
    turns = [turn for flow in made.flows for turn in flow.turns]
    bound = lower_bound(made, Cluster(engine=EngineSettings(block_size=made.block_size)))
    tokens = sum(turn.prompt_tokens for turn in turns)
    assert tokens / len(turns) == pytest.approx(8_600, rel=0.1)
    assert sum(turn.output_tokens for turn in turns) / len(turns) == pytest.approx(182, rel=0.1)
    assert sum(bound.cached_tokens) / tokens == pytest.approx(0.59, abs=0.05)


def test_one_system_prompt_is_shared_by_all() -> None:
    made = shared_prompt(SharedPrompt(requests=50, prompt_tokens=1_000))
    heads = {tuple(flow.turns[0].nodes[: 1_000 // 64]) for flow in made.flows}
    assert len(heads) == 1
    assert len({flow.turns[0].nodes[-1] for flow in made.flows}) == 50


def test_questions_about_one_document_share_it_and_all_share_the_system_prompt() -> None:
    made = documents(Documents(requests=60, documents=3, prompt_tokens=64, document=160, seed=test_seed() % 1000))
    chains = [flow.turns[0].nodes for flow in made.flows]
    assert len({tuple(chain[:4]) for chain in chains}) == 1
    assert len({tuple(chain[:14]) for chain in chains}) == 3
    assert len({chain[14] for chain in chains}) == 60, "questions and answers are nobody else's"


def test_coding_agents_share_instructions_and_send_each_conversation_again_with_every_turn() -> None:
    made = coding_agents(CodingAgents(sessions=60))
    assert [flow.start_seconds for flow in made.flows] == sorted(flow.start_seconds for flow in made.flows)
    whole = 20_000 // made.block_size
    for flow in made.flows:
        for before, turn in pairwise(flow.turns):
            assert turn.prompt_tokens > before.prompt_tokens + before.output_tokens
            assert turn.nodes[: len(before.nodes)] == before.nodes
            assert turn.think_seconds > 0
        assert flow.turns[0].think_seconds == 0
    beginnings = {flow.turns[0].nodes[: whole * 2 // 3].tobytes() for flow in made.flows}
    assert len(beginnings) == 2, "of sessions and of subagents"


@pytest.mark.parametrize("make", [lambda seed: conversations(5, seed), lambda seed: agents(Agents(5, seed))])
def test_generators_are_functions_of_their_seed(make) -> None:  # type: ignore[no-untyped-def]  # a lambda
    assert make(3) == make(3)
    assert make(3) != make(4)


def test_another_rate_and_bursts_keep_order_and_mean() -> None:
    made = mixed(test_seed(), 400)
    faster = at_rate(made, 10.0)
    assert faster.flow_rate == pytest.approx(10.0)
    bursts = in_bursts(faster, Burst(4.0, 2.0))
    starts = [flow.start_seconds for flow in bursts.flows]
    assert starts == sorted(starts)
    assert bursts.flow_rate == pytest.approx(10.0, rel=0.15)
    early = sum(start / 2.0 % 1.0 < 0.2 for start in starts)
    assert early / len(starts) == pytest.approx(0.8, abs=0.1)


def test_the_first_flow_may_come_long_before_the_others_which_keep_their_rhythm() -> None:
    made = mixed(test_seed(), 20)
    first, *others = (flow.start_seconds for flow in made.flows)
    assert [flow.start_seconds for flow in led(made, 10.0).flows] == [first, *(start + 10.0 for start in others)]
    assert led(made, 0.0) == made


@pytest.mark.parametrize(
    ("field", "burst"),
    [
        ("factor", Burst(6.0)),
        ("factor", Burst(0.5)),
        ("period_seconds", Burst(2.0, 0.0)),
        ("share", Burst(1.0, 1.0, 1.0)),
    ],
)
def test_bursts_out_of_range_are_named(field: str, burst: Burst) -> None:
    with pytest.raises(ConfigError) as raised:
        burst.validate()
    assert raised.value.field == field


def test_no_requests_and_no_rate_are_refused() -> None:
    with pytest.raises(ConfigError):
        Workload("empty", 16, ())
    with pytest.raises(ConfigError) as raised:
        at_rate(mixed(1, 5), 0.0)
    assert raised.value.field == "rate"


def test_the_index_answers_what_each_worker_held_an_event_delay_ago() -> None:
    rng = Random(test_seed())
    index, workers, delay = LateIndex(5, 100), 5, 100
    held: list[set[int]] = [set() for _ in range(workers)]
    late: list[tuple[int, int, list[int]]] = []
    for now in range(0, 20_000, 37):
        worker = rng.randrange(workers)
        events = []
        for node in rng.sample(range(1, 40), 6):
            events.append(node if rng.random() < 0.6 else -node)
        index.publish(worker, events, now)
        late.append((now + delay, worker, events))
        asked = rng.sample(range(1, 40), rng.randrange(8))
        while late and late[0][0] <= now:
            _, who, what = late.pop(0)
            for event in what:
                (held[who].add if event > 0 else held[who].discard)(abs(event))
        truth = {}
        for number, has in enumerate(held):
            depth = next((place for place, node in enumerate(asked) if node not in has), len(asked))
            if depth:
                truth[number] = depth
        assert index.overlaps(asked, now) == truth
