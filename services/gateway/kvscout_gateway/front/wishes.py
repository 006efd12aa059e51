"""What a request in OpenAI's form asks of a worker: its model, the tokens of its prompt, the length of its output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kvscout_common.errors import InvalidArgument
from kvscout_gateway.request.placement import Wish, new_request_id
from kvscout_gateway.request.prompt import Prompt
from kvscout_gateway.tokens.estimate import estimated_tokens, output_bound
from kvscout_gateway.tokens.prompt_tokens import PromptTokens, Source

if TYPE_CHECKING:
    from kvscout_gateway.gateway import Gateway

CHAT: Final = "/v1/chat/completions"


def model_of(fields: Mapping[str, Any]) -> str:
    """The model that a body names.

    Raises:
        InvalidArgument: It names none.
    """
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidArgument("must be the name of a model", field="model")
    return model


async def tokens_of(
    gateway: Gateway, path: str, fields: Mapping[str, Any], *, size: int, tenant: str, model: str
) -> PromptTokens:
    """The tokens of a request's prompt, where they can be had in time.

    Args:
        gateway: Where it came.
        path: Of its URL.
        fields: Of its body.
        size: Bytes of its body.
        tenant: Whose it is.
        model: As it names it.
    """
    view = gateway.catalog.tenant(tenant)
    target = view.resolve(model, "")
    if target.model not in view.models:
        return PromptTokens(b"", Source.NONE, "the model is not known here")
    prompts = gateway.tokens.prompts
    if path == CHAT:
        found = await prompts.of_chat(fields, size=size, model=target.model, tenant=tenant)
    else:
        found = await prompts.of_completion(fields, model=target.model, tenant=tenant)
    if found.source is Source.NONE:
        gateway.metrics.degraded("tokenizer")
    return found


def wish_of(gateway: Gateway, fields: Mapping[str, Any], tokens: PromptTokens, *, tenant: str, model: str) -> Wish:
    """What is asked of a worker.

    Args:
        gateway: Where it came.
        fields: Of its body.
        tokens: Of its prompt.
        tenant: Whose it is.
        model: As it names it.

    Raises:
        InvalidArgument: The prompt is too long.
    """
    limit = gateway.config.max_prompt_tokens
    if len(tokens) > limit:
        raise InvalidArgument(f"{len(tokens)} tokens, --max-prompt-tokens is {limit}", field="prompt")
    salt = fields.get("cache_salt")
    length = len(tokens)
    if not length:
        longest = gateway.catalog.tenant(tenant).serving(model).longest_prompt
        length = max(1, min(estimated_tokens(fields), limit, longest or limit))
    return Wish(
        model=model,
        tenant=tenant,
        prompt=Prompt(
            isl_tokens=length,
            token_ids=tokens.token_ids,
            cache_salt=salt if isinstance(salt, str) else "",
            unknown="" if len(tokens) else f"tokenizer: {tokens.problem or 'the prompt is empty'}",
        ),
        request_id=new_request_id(),
        expected_output_tokens=output_bound(fields),
    )
