"""Whether tokens are the engine's, by class of prompts."""

from __future__ import annotations

from array import array

from prometheus_client import CollectorRegistry

from kvscout_common.rpc.service_info import text_of
from kvscout_gateway.tokens import parity
from kvscout_gateway.tokens.parity import ParityCheck
from kvscout_gateway.values.prompt import TokenClass

M, N = (TokenClass("a", model, "messages", True, "tokenizer") for model in "mn")


def test_parity_counts_what_it_compares_and_names_the_classes_that_differ() -> None:
    registry = CollectorRegistry()
    check = ParityCheck(registry, every=4)
    assert [check.due(M) for _ in range(9)] == [True, False, False, False, True, False, False, False, True]

    def counted(outcome: str) -> float | None:
        return registry.get_sample_value("kvscout_token_parity_total", {"outcome": outcome})

    ours, theirs = array("I", range(100)), array("I", [*range(60), 7, *range(61, 90)])
    check.lengths(M, 100, 100)
    check.lengths(N, 100, 99)
    check.tokens(M, ours.tobytes(), theirs.tobytes())
    assert [counted(o) for o in ("match", "mismatch", "length_match", "length_mismatch")] == [None, 1, 1, 1]
    assert len(check.warnings()) == 2
    lines = [text_of(line) for line in check.warnings()]
    assert any("messages with tools, by tokenizer: from token 60 of 100 here, 90 in the engine" in one for one in lines)
    check.tokens(M, ours.tobytes(), ours.tobytes())
    assert len(check.warnings()) == 1


def test_one_match_makes_up_for_the_mismatches_before_it() -> None:
    check = ParityCheck(CollectorRegistry())
    for _ in range(parity.MAX_MISMATCHES - 1):
        check.lengths(M, 1, 2)
    assert not check.differs(M)
    check.lengths(M, 2, 2)
    check.lengths(M, 1, 2)
    assert not check.differs(M)
    assert not check.differs(N)


def test_tokens_that_differ_one_by_one_need_no_second_look_and_equal_numbers_do_not_excuse_them() -> None:
    now = [0.0]
    check = ParityCheck(CollectorRegistry(), every=1 << 30, clock=lambda: now[0])
    assert check.due(M)  # the first
    check.tokens(M, b"1234", b"1235")
    check.lengths(M, 1, 1)
    assert check.differs(M)
    assert check.differences()
    now[0] += parity.AGAIN_SECONDS + 1
    assert not check.differs(M)  # tried again
    assert check.due(M)
    check.tokens(M, b"1234", b"1234")
    assert not check.differences()
    assert not check.due(M)


def test_a_class_of_which_engines_cache_more_than_their_events_say_is_looked_at_more_closely() -> None:
    check = ParityCheck(CollectorRegistry(), every=1 << 30)
    assert check.due(N)
    for by_events in (False, False, True, *[False] * (parity.MAX_MISMATCHES - 1)):
        check.confirmed(M, by_events)
    assert not check.due(M)
    check.confirmed(M, False)
    assert not check.due(N)
    assert [check.due(M), check.due(M)] == [True, False]


def test_only_so_many_classes_are_remembered() -> None:
    check = ParityCheck(CollectorRegistry())
    for number in range(parity.MAX_CLASSES + 5):
        check.lengths(M._replace(model=str(number)), 1, 2)
    assert len(check.differences()) == parity.MAX_CLASSES
    assert M._replace(model="0") not in check.differences()
