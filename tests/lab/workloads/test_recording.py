"""Recordings: written and read, whole or cut off, as a workload and in Mooncake's format."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvscout.v1 import gateway_pb2
from kvscout_common.errors import ConfigError
from kvscout_common.worker import Role, WorkerSpec
from kvscout_lab.workloads.recording import (
    RecordedWorker,
    from_recording,
    head,
    is_recording,
    line_of,
    mooncake_lines,
    read_recording,
)
from kvscout_lab.workloads.trace import read_trace

WORKERS = [
    RecordedWorker.of(WorkerSpec(worker_id="w0", model="m", block_size=16, total_kv_blocks=64, role=Role.DECODE))
]


def message(arrived: float, *hashes: int, **fields: Any) -> gateway_pb2.RecordedRequest:
    """A request of the model m, in hashes of 64 tokens; ten tokens more than they cover, ten of output, a second."""
    usual: dict[str, Any] = {
        "model": "m", "prompt_tokens": 64 * len(hashes) + 10, "output_tokens": 10, "seconds": 1.0, "outcome": "ok",
        "streamed": True, "tokens_per_hash": 64,
    }  # fmt: skip
    return gateway_pb2.RecordedRequest(
        arrived_unix_seconds=arrived, prefix_hashes=[hash_ << 11 for hash_ in hashes],
        **(usual | fields),
    )  # fmt: skip


def written(path: Path, *messages: gateway_pb2.RecordedRequest) -> Path:
    lines = [head(["g:1"], WORKERS), *(line_of(one, "g:1") for one in messages)]
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.writelines(line + "\n" for line in lines)
    return path


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    full = message(
        5.25, 7, 8, session=3 << 11, max_tokens=99, priority=-2, worker_id="w0", dp_rank=1, predicted_tokens=64,
        cached_tokens=0, ttft_seconds=0.125, degraded="indexer", streamed=False,
    )  # fmt: skip
    path = written(tmp_path / name, message(9.0, outcome="cancelled"), full)
    assert is_recording(path)
    recording = read_recording([path])
    assert recording.workers == (WORKERS[0],)
    first, second = recording.requests
    assert (first.arrived, first.hash_ids, first.prompt_tokens, first.session) == (5.25, (7, 8), 138, 3)
    assert (first.max_tokens, first.priority, first.streamed, first.degraded) == (99, -2, False, "indexer")
    assert (first.worker_id, first.dp_rank, first.predicted_tokens, first.cached_tokens) == ("w0", 1, 64, 0)
    assert (first.ttft_seconds, first.seconds, first.output_tokens) == (0.125, 1.0, 10)
    assert (second.arrived, second.cached_tokens, second.worker_id, second.outcome) == (9.0, None, "", "cancelled")


def test_several_files_are_one_recording_of_the_model_with_most_requests(tmp_path: Path) -> None:
    one = written(tmp_path / "1", message(3.0, 1), message(4.0, 1, model="other"))
    two = written(tmp_path / "2", message(1.0, 1), message(2.0, 1))
    assert [request.arrived for request in read_recording([one, two]).requests] == [1.0, 2.0, 3.0]
    assert [request.arrived for request in read_recording([one, two], "other").requests] == [4.0]
    with pytest.raises(ConfigError, match="no request of model 'third'; it has m, other"):
        read_recording([one, two], "third")


def test_a_file_whose_recorder_was_killed_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    plain = written(tmp_path / "r.jsonl", message(1.0, 1), message(2.0, 2))
    plain.write_text(plain.read_text()[:-9])
    assert len(read_recording([plain]).requests) == 1
    packed = written(tmp_path / "r.jsonl.gz", *(message(float(at), at) for at in range(2_000)))
    packed.write_bytes(packed.read_bytes()[:-100])
    assert 0 < len(read_recording([packed]).requests) < 2_000


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "no JSON"),
        ("[1]", "no JSON object"),
        ('{"kvscout_recording": 2, "workers": []}', "version 2"),
        ('{"kvscout_recording": 1, "workers": [{"worker_id": "w"}]}', "no line of a recording"),
        ('{"timestamp": 1}', "KeyError"),
        (line_of(message(1.0, 1, prompt_tokens=63), "g"), "cover more than input_length"),
        (json.dumps(json.loads(line_of(message(1.0, 1), "g")) | {"output_length": -1}), "negative"),
        (json.dumps(json.loads(line_of(message(1.0, 1), "g")) | {"hash_ids": 7}), "no line of a recording"),
    ],
)
def test_a_wrong_line_is_an_error_that_names_it(tmp_path: Path, line: str, problem: str) -> None:
    path = written(tmp_path / "r.jsonl", message(1.0, 1))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=rf"r\.jsonl:3: .*{problem}"):
        read_recording([path])


def test_sessions_become_flows_whose_outputs_are_in_the_next_prompt(tmp_path: Path) -> None:
    path = written(
        tmp_path / "r",
        message(10.0, 1, 2, session=5 << 11, prompt_tokens=130, output_tokens=130),
        message(10.5, 9),  # of no session
        message(13.0, 1, 2, 3, 4, session=5 << 11),  # 2 s after the end of its first turn
        message(13.1, 1, 2, session=5 << 11),  # runs beside the turn before it
        message(5_000.0, 1, 2, session=5 << 11),  # more than an hour later
    )
    workload = from_recording("r", read_recording([path]))
    assert (workload.block_size, workload.requests, len(workload.flows)) == (16, 5, 4), "the engines' blocks"
    first, alone, beside, later = workload.flows
    assert [flow.start_seconds for flow in workload.flows] == pytest.approx([0.0, 0.5, 3.1, 4_990.0])
    assert [turn.think_seconds for turn in first.turns] == pytest.approx([0.0, 2.0])
    assert list(first.turns[0].nodes) == list(range(4, 20)), "130 tokens were generated: of the next prompt's blocks"
    assert list(first.turns[1].nodes)[:16] == list(range(4, 20)), "a hash of 64 tokens stands for four blocks"
    assert list(alone.turns[0].nodes)[:4] == [36, 37, 38, 39]
    fresh = [node for flow in (first, alone, beside, later) for turn in flow.turns for node in turn.nodes if node > 39]
    assert len(fresh) == len(set(fresh)), "a block without a hash is nobody else's"


def test_hashes_of_different_lengths_are_not_one_workload(tmp_path: Path) -> None:
    path = written(tmp_path / "r", message(1.0, 1), message(2.0, 1, tokens_per_hash=32))
    with pytest.raises(ConfigError, match=r"hashes are of \[32, 64\] tokens"):
        from_recording("r", read_recording([path]))


def mooncake(path: Path, messages: Sequence[gateway_pb2.RecordedRequest]) -> list[dict[str, Any]]:
    recording = read_recording([written(path, *messages)])
    lines = list(mooncake_lines(recording.requests))
    out = path.with_suffix(".mooncake")
    out.write_text("\n".join(lines))
    assert len(list(read_trace(out))) == len(lines), "it is what readers of the format read"
    return [json.loads(line) for line in lines]


def test_mooncakes_format_has_ids_of_512_tokens_and_times_from_the_first(tmp_path: Path) -> None:
    shared = list(range(1, 9))
    lines = mooncake(
        tmp_path / "r",
        [
            message(100.0, *shared, 21, 22),
            message(100.25, *shared),
            message(101.0, prompt_tokens=4_000),  # nobody knows its tokens
        ],
    )
    assert [line["timestamp"] for line in lines] == [0, 250]
    assert [line["input_length"] for line in lines] == [650, 522]
    (first, rest), (same, other_rest) = (line["hash_ids"] for line in lines)
    assert first == same == 8, "the hash of the prefix that ends there"
    assert rest != other_rest


def test_hashes_that_make_no_512_tokens_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tokens-per-hash 512"):
        mooncake(tmp_path / "r", [message(1.0, 1, 2, tokens_per_hash=48)])
