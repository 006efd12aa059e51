"""What vLLM's own scheduler publishes and hits for hybrid models with states; `make real-vllm-scheduler` runs it.

It runs in VENV, which has a vLLM, and needs no GPU, no weights and no model: only the scheduler and its KV cache
manager, with cache groups that are made up here. Requests of a fixed seed share prefixes, run side by side and in
chunks, are preempted and aborted. It writes what was added and aborted, and after each step the batch of events that
the scheduler published, the tokens that were sampled, and the cached tokens that the KV cache manager then computes for
some prompts. `tests/blocks/test_state_recordings.py` plays them to an index, and gives the mocker the same requests.
"""

from __future__ import annotations

import json
import math
import os
import random
import tempfile
import zlib
from pathlib import Path
from typing import Any

os.environ["PYTHONHASHSEED"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import msgspec
import torch
import vllm
from vllm.config import CacheConfig, KVEventsConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

DATA = Path(__file__).parent / "data" / "state_groups"
MAX_MODEL_LEN = 256
VOCABULARY = 100
REQUESTS = 32
PROBES = 3
"""Prompts that are looked up after each step."""


def full(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)


def window(block_size: int, tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=tokens
    )


def states(block_size: int, mode: str = "align") -> MambaSpec:
    return MambaSpec(block_size=block_size, shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode=mode)


# Groups, blocks of the pool, tokens a step, retention interval (0: vLLM's default; None: all), tokens a block hash.
MODELS: dict[str, tuple[list[Any], int, int, int | None, int]] = {
    "align": ([states(4), states(4), full(4)], 90, 64, 0, 4),
    "align-chunked": ([states(4), full(4)], 60, 20, 0, 4),
    "align-interval": ([states(4), full(4)], 70, 32, 16, 4),
    "align-dense": ([full(4), states(4)], 70, 20, None, 4),
    "all": ([states(4, "all"), full(4)], 100, 32, None, 4),
    "with-window": ([states(4), window(4, 10), full(4)], 90, 24, 0, 4),
    "larger-states": ([states(8), full(4)], 60, 24, 0, 4),
    "smaller-states": ([states(4), full(8)], 60, 24, None, 4),
    "finer-hashes": ([states(8), full(8)], 60, 24, 0, 4),
    "only-states-all": ([states(4, "all")], 60, 24, None, 4),
    "only-states-align": ([states(4)], 40, 24, 0, 4),
}


class Recorder:
    """Stands for the publisher of events."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []

    def publish(self, batch: Any) -> None:
        batch.ts = 0.0
        self.batches.append(msgspec.msgpack.encode(batch))


def tiny_config(folder: str) -> str:
    """A model's config.json: the scheduler asks it for its lengths alone."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": MAX_MODEL_LEN,
        "torch_dtype": "float32",
    }
    Path(folder, "config.json").write_text(json.dumps(config))
    return folder


def make_scheduler(folder: str, name: str, recorder: Recorder) -> tuple[Scheduler, int, int]:
    specs, num_blocks, chunk, retention, hash_block_size = MODELS[name]
    # Releases before 0.32 also had "all": a state at the end of each block, and no chunks that end with blocks.
    aligned = any(isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align" for spec in specs)
    mode = "align" if aligned else "none"
    block_size = math.lcm(*(spec.block_size for spec in specs))
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=True, mamba_cache_mode=mode)
    cache.num_gpu_blocks = num_blocks
    config = VllmConfig(
        model_config=ModelConfig(model=folder, tokenizer_mode="auto", skip_tokenizer_init=True, seed=0),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=chunk,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    cache.block_size = block_size  # CPUs prefer others.
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer.{n}"], spec) for n, spec in enumerate(specs)],
            prefix_cache_retention_interval=retention,
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_block_size,
        log_stats=False,
    )
    scheduler.kv_event_publisher = recorder
    return (
        scheduler,
        hash_block_size,
        max((spec.block_size for spec in specs if isinstance(spec, FullAttentionSpec)), default=block_size),
    )


def record(folder: str, name: str) -> bytes:
    rng, recorder = random.Random(name), Recorder()
    scheduler, hash_block_size, block_size = make_scheduler(folder, name, recorder)
    hasher = get_request_block_hasher(hash_block_size, sha256)
    records: list[Any] = []
    asked: list[list[int]] = [[1]]
    numbers = iter(range(10**9))

    def request_for(tokens: list[int], max_tokens: int) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, eos_token_id=0)
        return Request(str(next(numbers)), tokens, params, None, block_hasher=hasher)

    def prompt() -> list[int]:
        before = rng.choice(asked[-10:])
        tokens = before[: rng.randrange(1, len(before) + 1)] if rng.random() < 0.5 else list(before)
        return (tokens + [rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 0, 3, 8, 20, 45]))])[:150]

    def step() -> None:
        planned = scheduler.schedule()
        ids = list(planned.num_scheduled_tokens)
        sampled = [
            [rng.randrange(1, VOCABULARY)]
            if scheduler.requests[i].num_computed_tokens >= scheduler.requests[i].num_tokens
            else []
            for i in ids
        ]
        output = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={i: n for n, i in enumerate(ids)}, sampled_token_ids=sampled
        )
        running = {i: scheduler.requests[i] for i in ids}
        scheduler.update_from_output(planned, output)
        asked.extend(list(request.all_token_ids) for request in running.values() if request.is_finished())
        assert not scheduler.kv_cache_manager.block_pool.kv_event_queue
        payload = recorder.batches.pop() if recorder.batches else b""
        records.append(["step", payload, [[int(i), *tokens] for i, tokens in zip(ids, sampled, strict=True)]])
        assert not recorder.batches
        for _ in range(PROBES):
            tokens = prompt()
            _, cached, _ = scheduler.kv_cache_manager.get_computed_blocks(request_for(tokens, 1))
            records.append(["ask", tokens, cached])

    for _ in range(REQUESTS):
        request = request_for(prompt(), rng.choice([1, 2, 9, 20]))
        scheduler.add_request(request)
        records.append(["add", int(request.request_id), request.prompt_token_ids, request.max_tokens])
        for _ in range(rng.choice([0, 1, 1, 2, 5, 30])):
            if scheduler.has_unfinished_requests():
                step()
        if rng.random() < 0.05:
            scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
            records.append(["abort", int(request.request_id)])
    while scheduler.has_unfinished_requests():
        step()
    _, num_blocks, chunk, _, _ = MODELS[name]
    head = {"vllm": vllm.__version__, "block_size": block_size, "num_blocks": num_blocks, "chunk": chunk}
    return zlib.compress(msgspec.msgpack.encode([head, records]), 9)


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        tiny_config(folder)
        for name in MODELS:
            data = record(folder, name)
            (DATA / f"{name}.bin").write_bytes(data)
            print(f"{name}: {len(data):,} bytes", flush=True)


if __name__ == "__main__":
    main()
