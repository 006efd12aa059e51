"""What a request in OpenAI's form asks of a worker: its model, the tokens of its prompt, the length of its output."""

from __future__ import annotations

from dataclasses import dataclass

from kvscout_common.http.json_fields import Fields
from kvscout_common.worker import EngineKind
from kvscout_gateway.fronts.body import text_of
from kvscout_gateway.fronts.client_paths import CHAT
from kvscout_gateway.fronts.outputs import output_of
from kvscout_gateway.members.catalog import Catalog
from kvscout_gateway.request.metrics import GatewayMetrics
from kvscout_gateway.tokens.prompt_tokens import CHARACTERS_A_TOKEN, PromptTokenizer, PromptTokens, Source
from kvscout_gateway.values.prompt import Prompt, PromptTooLong
from kvscout_gateway.values.request import Request, new_request_id


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What requests in OpenAI's form are read with: one for a gateway."""

    catalog: Catalog
    tokenizer: PromptTokenizer
    metrics: GatewayMetrics
    max_prompt_tokens: int


async def tokens_of(
    context: RequestContext, path: str, fields: Fields, *, size: int, tenant: str, model: str
) -> PromptTokens:
    """Return the tokens of a request's prompt, where they can be had in time.

    Args:
        context: What it is read with.
        path: Of its URL.
        fields: Of its body.
        size: Bytes of its body.
        tenant: Whose it is.
        model: As it names it.
    """
    view = context.catalog.tenant(tenant)
    target = view.resolve(model, "")
    if target.model not in view.models:
        return PromptTokens(b"", Source.NONE, "the model is not known here")
    prompts = context.tokenizer
    if path == CHAT:
        kinds = {spec.engine for spec in view.serving(target.model).specs}
        # Where engines of one model differ, most clients' prompts have neither tools nor parts, and are alike.
        engine = EngineKind.SGLANG if kinds == {EngineKind.SGLANG} else EngineKind.VLLM
        found = await prompts.of_chat(fields, size=size, model=target.model, tenant=tenant, engine=engine)
    else:
        found = await prompts.of_completion(fields, model=target.model, tenant=tenant)
    if found.source is Source.NONE:
        context.metrics.degraded("tokenizer")
    return found


def request_of(
    context: RequestContext, path: str, fields: Fields, tokens: PromptTokens, *, tenant: str, model: str
) -> Request:
    """Return what is asked of a worker.

    Args:
        context: What it is read with.
        path: Of its URL.
        fields: Of its body.
        tokens: Of its prompt.
        tenant: Whose it is.
        model: As it names it.

    Raises:
        InvalidArgument: The prompt is too long, or what tells prompts apart is no text.
    """
    limit = context.max_prompt_tokens
    field = "prompt" if "prompt" in fields else "messages"
    if len(tokens) > limit:
        raise PromptTooLong(len(tokens), limit, field=field)
    salt = fields.get("cache_salt")
    length, further = len(tokens), tokens.further_tokens
    if not length:
        further = 0  # the estimate is of all prompts
        longest = context.catalog.tenant(tenant).serving(model).longest_prompt
        length = max(1, min(fields.characters // CHARACTERS_A_TOKEN, limit, longest or limit))
    return Request(
        model=model,
        tenant=tenant,
        prompt=Prompt(
            isl_tokens=length + further,
            token_ids=tokens.token_ids,
            cache_salt=text_of(salt, "cache_salt") if isinstance(salt, str) else "",
            further_tokens=further,
            field=field,
            unknown="" if len(tokens) else f"tokenizer: {tokens.problem or 'the prompt is empty'}",
        ),
        request_id=new_request_id(),
        output=output_of(path, fields),
    )
