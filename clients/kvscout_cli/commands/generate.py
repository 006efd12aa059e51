"""`kvscout generate`: run a prompt on the best worker."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import click

from kvscout_cli import completion
from kvscout_cli.connection import Connection, chosen_model, connection_flags, json_flag, model_flag, option
from kvscout_cli.lifetime import run
from kvscout_cli.output import echo, print_json
from kvscout_cli.prompt import Prompt, prompt_arguments
from kvscout_cli.tables import stderr
from kvscout_client import FinishReason, GenerateChunk, RouteDecision, SamplingOptions, StopConditions, Usage
from kvscout_common.settings.flags import SectionedCommand


@dataclass(slots=True)
class _Answer:
    request_id: str = ""
    decision: RouteDecision | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    ttft_seconds: float | None = None
    duration_seconds: float = 0.0

    def add(self, chunk: GenerateChunk, elapsed_seconds: float) -> None:
        self.request_id = chunk.request_id or self.request_id
        self.decision = chunk.decision or self.decision
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.usage = chunk.usage or self.usage
        if chunk.token_ids and not self.token_ids:
            self.ttft_seconds = elapsed_seconds
        self.token_ids.extend(chunk.token_ids)
        self.text += chunk.text
        self.duration_seconds = elapsed_seconds


@click.command(cls=SectionedCommand)
@prompt_arguments
@model_flag
@option("--lora-name", default="", help="LoRA adapter.")
@option("--cache-salt", default="", help="Cache salt.")
@option("--pinned-worker-id", default="", shell_complete=completion.workers, help="Worker that must run it.")
@option("--max-tokens", default=16, show_default=True, type=click.IntRange(min=1), help="Tokens to generate.")
@option("--ignore-eos", is_flag=True, help="Continue past the end-of-sequence token.")
@option("--sampling-temperature", type=click.FloatRange(min=0), help="0 = greedy.  [default: the engine's]")
@json_flag
@connection_flags
def command(
    connection: Connection,
    *,
    prompt: Prompt,
    model: str,
    lora_name: str,
    cache_salt: str,
    pinned_worker_id: str,
    max_tokens: int,
    ignore_eos: bool,
    sampling_temperature: float | None,
    as_json: bool,
) -> None:
    """Run a prompt and stream its output, as text if the engine sends it, otherwise as token ids.

    \b
        kvscout generate $(seq 1 100) --max-tokens 8
        kvscout generate --text "Once upon a time"
    """

    async def fetch() -> _Answer:
        answer = _Answer()
        async with connection.router() as router:
            chosen = await chosen_model(router, model)
            token_ids = await prompt.tokens(router, chosen)
            started = time.monotonic()
            chunks = router.generate(
                token_ids,
                model=chosen,
                stop=StopConditions(max_tokens=max_tokens, ignore_eos=ignore_eos),
                sampling=SamplingOptions(temperature=sampling_temperature),
                lora_name=lora_name,
                cache_salt=cache_salt,
                pinned_worker_id=pinned_worker_id,
                start_timeout_seconds=connection.timeout_seconds,
            )
            async for chunk in chunks:
                answer.add(chunk, time.monotonic() - started)
                if not as_json:
                    echo(chunk.text or "".join(f"{token} " for token in chunk.token_ids), nl=False, limit=None)
        return answer

    answer = run(fetch())
    if as_json:
        print_json(answer)
        return
    echo()
    stderr().print(_summary(answer), style="dim")


def _summary(answer: _Answer) -> str:
    parts = []
    if answer.decision is not None:
        parts.append(f"{answer.decision.worker.worker_id}, rank {answer.decision.worker.dp_rank}")
    if answer.usage is not None:
        cached = "unknown" if answer.usage.cached_tokens is None else str(answer.usage.cached_tokens)
        parts.append(f"{answer.usage.prompt_tokens} prompt tokens, {cached} cached")
        parts.append(f"{answer.usage.completion_tokens} generated")
    if answer.ttft_seconds is not None:
        parts.append(f"first after {1000 * answer.ttft_seconds:.0f} ms")
    return " · ".join(parts)
