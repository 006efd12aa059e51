"""A request in a client's dialect → the request to a worker: model, prompt tokens, output length."""

from __future__ import annotations

from collections.abc import Iterable

from kvscout_common.http.json_fields import Fields
from kvscout_common.worker import EngineKind
from kvscout_gateway.fronts.body import text_of
from kvscout_gateway.fronts.context import FrontContext
from kvscout_gateway.fronts.outputs import output_of
from kvscout_gateway.tokens.prompt_tokens import CHARACTERS_A_TOKEN, unknown_prompt
from kvscout_gateway.values.dialects import API_DIALECTS, CHAT, COMPLETIONS, ApiDialect
from kvscout_gateway.values.prompt import Prompt, PromptTooLong
from kvscout_gateway.values.request import Request, new_request_id


async def request_of(
    context: FrontContext,
    path: str,
    headers: Iterable[tuple[str, str]],
    fields: Fields,
    *,
    size: int,
    tenant: str,
    model: str,
) -> Request:
    """Return the request to a worker, with the tokens of its prompt where they can be had in time.

    Args:
        context: Collaborators.
        path: Path of its URL.
        headers: Of the request.
        fields: Fields of its body.
        size: Bytes of its body.
        tenant: The caller's tenant.
        model: Model or adapter, as the client names it.

    Raises:
        InvalidArgument: The prompt is too long, or the salt of its cache is no text.
    """
    # What comes on another path is read as the dialect that its fields are of.
    api = API_DIALECTS.get(path) or (COMPLETIONS if "prompt" in fields or "messages" not in fields else CHAT)
    prompt = await _prompt_of(context, api if path == api.path else COMPLETIONS, fields, size, tenant, model)
    limit, salt = context.max_prompt_tokens, fields.get("cache_salt")
    prompt.field = api.prompt
    if prompt.own_tokens > limit:
        raise PromptTooLong(prompt.own_tokens, limit, field=prompt.field)
    if isinstance(salt, str):
        prompt.cache_salt = text_of(salt, "cache_salt")
    if not prompt.token_ids:
        prompt.unknown = prompt.unknown or prompt.partial or "tokenizer: the prompt is empty"
        prompt.further_tokens = 0  # the estimate is of all prompts
        longest = context.catalog.tenant(tenant).serving(model).longest_prompt
        prompt.isl_tokens = max(1, min(fields.characters // CHARACTERS_A_TOKEN, limit, longest or limit))
    session = context.sessions.of(tenant, headers, fields)
    return Request(
        model,
        tenant,
        prompt,
        api=api,
        front=path,
        request_id=new_request_id(),
        output=output_of(path, fields),
        session=session,
    )


async def _prompt_of(
    context: FrontContext, api: ApiDialect, fields: Fields, size: int, tenant: str, model: str
) -> Prompt:
    view = context.catalog.tenant(tenant)
    target = view.resolve(model, "")
    if target.model not in view.models:
        return unknown_prompt("the model is not known here")
    prompts = context.tokens.prompts
    if api is not COMPLETIONS:
        kinds = {spec.engine for spec in view.serving(target.model).specs}
        # Where engines of one model differ, most clients' prompts have neither tools nor parts, and are alike.
        engine = EngineKind.SGLANG if kinds == {EngineKind.SGLANG} else EngineKind.VLLM
        prompt = await prompts.of_chat(
            fields, size=size, model=target.model, tenant=tenant, engine=engine, dialect=api.name
        )
    else:
        prompt = await prompts.of_completion(fields, model=target.model, tenant=tenant, size=size)
    if prompt.unknown or prompt.partial:
        context.exchanges.context.metrics.degraded("tokenizer")
    return prompt
