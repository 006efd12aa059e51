"""Traces of Mooncake and AIPerf: what is read, what is refused, which prefixes prompts share."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvscout_common.errors import ConfigError
from kvscout_lab.workloads.trace import MAX_TOKENS, TraceOptions, prompt_tokens, read_trace, trace_sessions

LINES = [
    {"timestamp": 1000, "input_length": 600, "output_length": 50, "hash_ids": [0, 1]},
    {"timestamp": 1000, "input_length": 1024, "output_length": 0, "hash_ids": [0, 2]},
    {"timestamp": 4000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 3]},
]

AIPERF = [
    {"session_id": "a", "input_length": 600, "output_length": 100, "hash_ids": [0, 1], "timestamp": 0.0, "group_id": 0},
    {"session_id": "a", "input_length": 700, "output_length": 30, "hash_ids": [2, 3], "delay": 4146.4},
    {"session_id": "a", "input_length": 10, "output_length": 5, "hash_ids": [4], "delay": 0},
    {"session_id": "b", "input_length": 512, "output_length": 8, "hash_ids": [0], "timestamp": 0.0, "group_id": 1},
    {"session_id": "b", "input_length": 20, "output_length": 8, "hash_ids": [5], "delay": 500},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)) + "\n")
    return path


def test_sessions_have_one_turn_of_the_recorded_lengths_and_times(trace: Path) -> None:
    sessions = list(trace_sessions(trace, TraceOptions()))
    assert [s.start_seconds for s in sessions] == [0, 0, 3]
    assert [len(s.turns[0].new_tokens) for s in sessions] == [600, 1024, 1100]
    assert [s.turns[0].max_tokens for s in sessions] == [50, 1, 7]
    assert all(len(s.turns) == 1 for s in sessions)


def test_prompts_share_exactly_the_prefixes_that_hash_ids_share(trace: Path) -> None:
    one, two, three = (s.turns[0].new_tokens for s in trace_sessions(trace, TraceOptions()))
    assert one[:512] == two[:512] == three[:512]
    assert one[512:600] == three[512:600]
    assert one[512:600] != two[512:600]


def test_an_id_stands_for_the_same_tokens_every_time() -> None:
    assert prompt_tokens([5, 6], 700, 32_000) == prompt_tokens([5, 6], 1024, 32_000)[:700]
    assert prompt_tokens([5], 512, 32_000) != prompt_tokens([6], 512, 32_000)


def test_rate_limit_and_cuts_apply(trace: Path) -> None:
    options = TraceOptions(limit=2, rate_scale=2, max_output_tokens=20, max_input_tokens=1050)
    sessions = list(trace_sessions(trace, options))
    assert [len(s.turns[0].new_tokens) for s in sessions] == [600, 1024]
    assert [s.turns[0].max_tokens for s in sessions] == [20, 1]
    assert list(trace_sessions(trace, TraceOptions(rate_scale=2)))[-1].start_seconds == 1.5


def written(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_lines_with_a_delay_continue_their_session(tmp_path: Path) -> None:
    one, two = trace_sessions(written(tmp_path / "aiperf.jsonl", AIPERF), TraceOptions())
    assert [len(turn.new_tokens) for turn in one.turns] == [600, 700, 10]
    assert [turn.max_tokens for turn in one.turns] == [100, 30, 5]
    assert [turn.think_seconds for turn in one.turns] == [0, 4.1464, 0]
    assert [len(turn.new_tokens) for turn in two.turns] == [512, 20]
    assert one.turns[0].new_tokens[:512] == two.turns[0].new_tokens


def test_a_compressed_trace_is_the_same(tmp_path: Path) -> None:
    plain = written(tmp_path / "aiperf.jsonl", AIPERF)
    packed = tmp_path / "aiperf.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(read_trace(packed)) == list(read_trace(plain))
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_trace(packed))


def test_options_apply_to_the_turns_of_a_session(tmp_path: Path) -> None:
    path = written(tmp_path / "aiperf.jsonl", AIPERF)

    def turns(options: TraceOptions) -> list[int]:
        return [len(session.turns) for session in trace_sessions(path, options)]

    assert turns(TraceOptions(limit=2)) == [2]
    assert turns(TraceOptions(limit=4)) == [3, 1]
    # The second prompt has 600 + 100 + 700 tokens, or with a shorter answer 50 less.
    assert turns(TraceOptions(max_input_tokens=1_399)) == [1, 2]
    assert turns(TraceOptions(max_input_tokens=1_350, max_output_tokens=50)) == [2, 2]
    one, _ = trace_sessions(path, TraceOptions(rate_scale=2))
    assert one.turns[1].think_seconds == 2.0732


def test_sessions_are_made_lazily(trace: Path) -> None:
    with trace.open("a") as lines:
        lines.write("no json\n")
    sessions = trace_sessions(trace, TraceOptions())
    assert [next(sessions).session_id for _ in range(2)] == ["trace-0", "trace-1"]
    # Whether the third one goes on is in the line behind it.
    with pytest.raises(ConfigError, match=r"trace\.jsonl:4"):
        next(sessions)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        '{"timestamp": 0}',
        '{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}',
        '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": 7}',
        '{"timestamp": 0, "input_length": 1e400, "output_length": 1, "hash_ids": []}',
        '{"timestamp": NaN, "input_length": 5, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 5, "output_length": 1000000000000, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 5, "output_length": -1, "hash_ids": [1]}',
        "[" * 100_000,
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("\n" + line + "\n")
    with pytest.raises(ConfigError, match=r"bad\.jsonl:2"):
        list(read_trace(path))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"session_id": "b"}, "session_id 'b': the line before is of another session"),
        ({"session_id": None}, "session_id"),
        ({"session_id": ""}, "no session_id"),
        ({"delay": -1}, "delay must be"),
        ({"delay": float("inf")}, "delay must be"),
        ({"delay": "soon"}, "soon"),
        ({"timestamp": 0}, "both timestamp and delay"),
        ({"hash_ids": [2]}, "1 hash_ids do not cover 700"),
        ({"input_length": 0, "hash_ids": []}, "input_length"),
    ],
)
def test_a_bad_line_of_a_session_is_named(tmp_path: Path, changes: dict[str, object], problem: str) -> None:
    path = written(tmp_path / "bad.jsonl", [AIPERF[0], AIPERF[1] | changes])
    with pytest.raises(ConfigError, match=r"bad\.jsonl:2") as caught:
        list(read_trace(path))
    assert problem in str(caught.value)


def test_a_session_whose_prompt_grows_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    later = AIPERF[1] | {"output_length": MAX_TOKENS}
    path = written(tmp_path / "bad.jsonl", [AIPERF[0], later, AIPERF[2]])
    with pytest.raises(ConfigError, match=r"bad\.jsonl:3: input_length"):
        list(read_trace(path))


def test_a_session_without_its_first_line_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "bad.jsonl", AIPERF[1:])
    with pytest.raises(ConfigError, match=r"bad\.jsonl:1.*session_id 'a'"):
        list(read_trace(path))


def test_a_missing_file_and_times_that_go_backwards_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_trace(tmp_path / "none"))
    path = tmp_path / "backwards.jsonl"
    path.write_text("\n".join(map(json.dumps, reversed(LINES))))
    with pytest.raises(ConfigError, match="backwards"):
        list(trace_sessions(path, TraceOptions()))


@pytest.mark.parametrize(("field", "value"), [("rate_scale", 0.0), ("limit", -1), ("max_output_tokens", -1)])
def test_an_option_out_of_range_is_named(trace: Path, field: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        list(trace_sessions(trace, TraceOptions(**{field: value})))  # type: ignore[arg-type]
    assert caught.value.field == field
