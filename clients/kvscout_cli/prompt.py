"""Prompts of commands: arguments, a file, stdin, or a text that an engine tokenizes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TextIO

import click

from kvscout_cli.connection import option
from kvscout_client import Router
from kvscout_common.errors import FailedPrecondition, Unavailable

TOKENIZE_SECONDS: Final = 10.0
MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
MAX_ASKED: Final = 3
"""Engines that are asked for tokens, one after the other, where they cannot be reached."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, or a text that has to be tokenized first."""

    token_ids: Sequence[int] = ()
    text: str = ""

    async def tokens(self, router: Router, model: str) -> Sequence[int]:
        """Return the token ids; those of a text as an engine of the model has them.

        Raises:
            Unavailable: No engine of the model answers.
            FailedPrecondition: It does not tokenize.
        """
        if not self.text:
            return self.token_ids
        records = await router.list_workers(model=model)
        urls = [record.spec.http_endpoint for record in records if record.spec.http_endpoint]
        if not urls:
            raise FailedPrecondition(f"no worker of {model!r} has an HTTP endpoint that could tokenize", field="--text")
        failure = Unavailable("nobody was asked")
        for url in urls[:MAX_ASKED]:
            try:
                return await _tokenize(url, model, self.text)
            except Unavailable as error:
                failure = error
        raise failure


async def _tokenize(url: str, model: str, text: str) -> list[int]:
    import aiohttp  # only for a text: commands start without it

    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TOKENIZE_SECONDS)) as http,
            http.post(f"{url}/tokenize", json={"model": model, "prompt": text}) as answer,
        ):
            body = b""
            async for chunk in answer.content.iter_any():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise FailedPrecondition(f"{url}/tokenize answers without end", field="--text")
            if answer.status != 200:
                said = body.decode(errors="replace")[:200]
                raise FailedPrecondition(f"{url}/tokenize answered {answer.status}: {said}", field="--text")
            document = json.loads(body)
    except (aiohttp.ClientError, TimeoutError) as error:
        unreachable = Unavailable(f"the engine at {url} does not tokenize --text: {str(error) or 'no answer in time'}")
        unreachable.answered = True  # the gateway did
        raise unreachable from error
    except ValueError as error:
        raise FailedPrecondition(f"{url}/tokenize did not answer with JSON", field="--text") from error
    tokens = document.get("tokens") if isinstance(document, dict) else None
    if not isinstance(tokens, list) or not tokens:
        raise FailedPrecondition(f"{url}/tokenize gave no tokens", field="--text")
    return parse_tokens(json.dumps(tokens))


def prompt_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `[TOKENS]...`, `--file` and `--text` to a command; it gets them as `prompt`."""

    @click.argument("tokens", nargs=-1)
    @option(
        "--file", "source", type=click.File(), help="Read token ids from a file, - = stdin: a JSON list, or numbers."
    )
    @option("--text", default="", help="Text of the prompt, instead of token ids; an engine of the model tokenizes it.")
    @functools.wraps(command)
    def with_prompt(*arguments: Any, tokens: tuple[str, ...], source: TextIO | None, text: str, **values: Any) -> Any:
        if bool(tokens) + bool(source) + bool(text) != 1:
            raise click.UsageError("Give token ids as arguments or with --file (- = stdin), or a --text.")
        ids = () if text else parse_tokens(source.read() if source else " ".join(tokens))
        return command(*arguments, prompt=Prompt(ids, text), **values)

    return with_prompt


def parse_tokens(text: str) -> list[int]:
    """Parse the token ids in a text: a JSON list, or numbers between spaces, commas or line ends.

    Raises:
        BadParameter: It is something else, empty, or an id is not a u32.
    """
    try:
        if text.lstrip().startswith("["):
            ids = json.loads(text)
        else:
            ids = [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise click.BadParameter(f"not token ids: {error}", param_hint="TOKENS") from None
    if not ids:
        raise click.BadParameter("no token ids given", param_hint="TOKENS")
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**32:
            raise click.BadParameter(f"not a token id: {token!r}", param_hint="TOKENS")
    return list(ids)
