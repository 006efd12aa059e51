"""`kvscout route`: where would this prompt go, and why?"""

from __future__ import annotations

import click
from rich.table import Table

from kvscout_cli import completion
from kvscout_cli.connection import Connection, chosen_model, connection_flags, json_flag, model_flag, option
from kvscout_cli.lifetime import run
from kvscout_cli.output import print_json
from kvscout_cli.prompt import Prompt, prompt_arguments
from kvscout_cli.tables import columns, stdout
from kvscout_client import Explanation, RouteDecision, RouterOverride
from kvscout_common.errors import Unavailable
from kvscout_common.settings.flags import SectionedCommand, ValueOf
from kvscout_common.worker import Role


@click.command(cls=SectionedCommand)
@prompt_arguments
@model_flag
@option("--lora-name", default="", help="LoRA adapter.")
@option("--cache-salt", default="", help="Cache salt.")
@option("--role", default=Role.AGGREGATED.value, show_default=True, type=ValueOf(Role), help="Role of the worker.")
@option("--pinned-worker-id", default="", shell_complete=completion.workers, help="Worker that must be chosen.")
@option("--policy", shell_complete=completion.policies, help="Policy for this request, such as kv or round-robin.")
@option("--router-temperature", type=float, help="Router temperature for this request.")
@option("--overlap-score-weight", type=float, help="Overlap score weight for this request.")
@option("--explain", is_flag=True, help="Show every candidate.")
@json_flag
@connection_flags
def command(
    connection: Connection,
    *,
    prompt: Prompt,
    model: str,
    lora_name: str,
    cache_salt: str,
    role: Role,
    pinned_worker_id: str,
    policy: str | None,
    router_temperature: float | None,
    overlap_score_weight: float | None,
    explain: bool,
    as_json: bool,
) -> None:
    """Show where a prompt would go. Nothing is booked.

    \b
        kvscout route 1 2 3 4
        kvscout route --file prompt.json --explain
        kvscout route --text "Once upon a time" --explain
    """

    async def fetch() -> tuple[int, RouteDecision]:
        async with connection.router() as router:
            chosen = await chosen_model(router, model)
            token_ids = await prompt.tokens(router, chosen)
            try:
                return len(token_ids), await router.route(
                    token_ids,
                    model=chosen,
                    lora_name=lora_name,
                    cache_salt=cache_salt,
                    role=role,
                    pinned_worker_id=pinned_worker_id,
                    override=RouterOverride(overlap_score_weight, router_temperature, policy),
                    # A person is told why; a program when it asks.
                    explain=explain or not as_json,
                )
            except Unavailable as error:
                roles = sorted({record.spec.role.value for record in await router.list_workers(model=chosen)})
                if not roles or role.value in roles:
                    raise
                hint = Unavailable(f"{error.message}: choose --role {' or --role '.join(roles)}")
                hint.answered = error.answered
                raise hint from error

    isl_tokens, decision = run(fetch())
    if as_json:
        print_json(decision)
        return
    console = stdout()
    cached = decision.overlap_blocks * decision.block_size
    console.print(f"worker    {decision.worker.worker_id}, rank {decision.worker.dp_rank}")
    console.print(f"endpoint  {decision.http_endpoint or '–'}")
    console.print(
        f"overlap   {decision.overlap_blocks} of {decision.num_blocks} blocks, {cached} of {isl_tokens} tokens"
    )
    why = decision.explanation
    chosen = next((each for each in why.candidates if each.worker == decision.worker), None) if why else None
    console.print(f"cost      {chosen.cost_text if chosen and chosen.cost_text else f'{decision.cost:g}'}")
    if decision.degraded:
        console.print(f"degraded  {'; '.join(decision.degraded_reasons)}")
    if why is not None:
        console.print(f"why       {why.summary or why.reason} (policy {why.policy})", soft_wrap=True)
    if why is not None and explain:
        console.print(f"reason    {why.reason}\n", soft_wrap=True)
        console.print(_candidates(why))


def _candidates(explanation: Explanation) -> Table:
    headings = ("rank", "device", "host", "disk", "prefill blocks", "decode blocks")
    table = columns("worker", *headings, "cost", "not eligible", right=(*headings, "cost"))
    for c in sorted(explanation.candidates, key=lambda c: (not c.eligible, c.cost, c.worker)):
        numbers = (c.worker.dp_rank, c.device_blocks, c.host_blocks, c.disk_blocks)
        blocks = (f"{c.prefill_blocks:g}", f"{c.decode_blocks:g}")
        cost = c.cost_text or f"{c.cost:g}"
        table.add_row(c.worker.worker_id, *(str(n) for n in numbers), *blocks, cost, c.ineligible_reason)
    return table
