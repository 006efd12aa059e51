"""Mooncake traces: what is read, what is refused, which prefixes prompts share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvscout_common.errors import ConfigError
from kvscout_lab.workloads.trace import TraceOptions, prompt_tokens, read_trace, trace_sessions

LINES = [
    {"timestamp": 1000, "input_length": 600, "output_length": 50, "hash_ids": [0, 1]},
    {"timestamp": 1000, "input_length": 1024, "output_length": 0, "hash_ids": [0, 2]},
    {"timestamp": 4000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 3]},
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


def test_sessions_are_made_lazily(trace: Path) -> None:
    with trace.open("a") as lines:
        lines.write("no json\n")
    sessions = trace_sessions(trace, TraceOptions())
    assert [next(sessions).session_id for _ in range(3)] == ["trace-0", "trace-1", "trace-2"]
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
        "[" * 100_000,
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("\n" + line + "\n")
    with pytest.raises(ConfigError, match=r"bad\.jsonl:2"):
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
