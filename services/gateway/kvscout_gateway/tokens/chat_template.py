"""A model's chat template: messages → the text that its engine tokenizes.

Templates come with models, from anywhere: they run in jinja2's sandbox, for so long and to so long a text. What a
template does within one step, such as `'x' * 10**9`, is not bounded: that is the harm an operator's choice of model can
do.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvscout_common.errors import ConfigError
from kvscout_gateway.tokens.conversation import NotText, TemplateTraits, conversation, template_variables, tools_shown
from kvscout_gateway.tokens.sglang_conversation import SglangPrompt, SglangRelease, sglang_prompt

MAX_SECONDS: Final = 1.0
MAX_CHARACTERS: Final = 8 * 1024 * 1024
MAX_FILE_BYTES: Final = 8 * 1024 * 1024
"""Longest tokenizer_config.json: those of models with many added tokens have some hundred KiB."""
_FINAL_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TooLong(NotText):
    """A template took too long, or put out too much."""


class ChatTemplate:
    """The template of one model. Can be used from any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, tool_source: str | None = None) -> None:
        """Compiles it.

        Args:
            source: Jinja.
            special_tokens: What the template sees as `bos_token` and the like.
            tool_source: Taken instead for requests with tools; None = there is no such.

        Raises:
            jinja2.TemplateError: It is no template.
        """
        self._environment = _Bounded()
        self._special_tokens = dict(special_tokens)
        self._plain = _Compiled(self._environment, source)
        self._with_tools = self._plain if tool_source is None else _Compiled(self._environment, tool_source)
        sources = [source] if tool_source is None else [source, tool_source]
        self.traits = TemplateTraits(any(map(_merges_system, sources)), self._disabled_effort())

    @classmethod
    def load(cls, folder: Path, *, flag: str) -> ChatTemplate | None:
        """Read the template of a model's folder; None = it has none.

        Raises:
            ConfigError: It is there and cannot be read; names the flag.
        """
        config = _read_json(folder / "tokenizer_config.json", flag=flag)
        own = folder / "chat_template.jinja"
        try:
            source: Any = own.read_text() if own.is_file() else config.get("chat_template")
            if source is None:
                source = _read_json(folder / "chat_template.json", flag=flag).get("chat_template")
            named = (
                {one["name"]: one["template"] for one in source} if isinstance(source, list) else {"default": source}
            )
            if named.get("default") is None:
                return None
            tokens = _read_json(folder / "special_tokens_map.json", flag=flag) | config
            special = {name: content for name in _SPECIAL_TOKENS if (content := _content(tokens.get(name))) is not None}
            return cls(named["default"], special, tool_source=named.get("tool_use"))
        except (jinja2.TemplateError, OSError, TypeError, KeyError, ValueError) as error:
            raise ConfigError(f"{folder} has a chat template that cannot be read: {error}", field=flag) from error

    @property
    def shows_media_in_place(self) -> bool:
        """Tell whether vLLM shows images among the texts of their message; else they come before these."""
        return self._plain.as_parts

    def render(self, request: Mapping[str, Any]) -> str:
        """Return the text of a chat request.

        Raises:
            NotText: The request is none, or not only text; or the template refuses it.
            TooLong: It takes too long, or puts out too much.
        """
        tools = tools_shown(request)
        template = self._plain if tools is None else self._with_tools
        messages = template.shown(request.get("messages"))
        continued = bool(request.get("continue_final_message"))
        if continued:
            _mark_end(messages)
        text = self._run(template, template_variables(request) | {"messages": messages, "tools": tools})
        return _until_mark(text) if continued else text

    def render_for_sglang(self, request: Mapping[str, Any], release: SglangRelease) -> tuple[str, str]:
        """Return the text of a chat request as SGLang renders it, and a text whose tokens follow those of the first.

        Args:
            request: The body of the chat completion.
            release: The engine's.

        Raises:
            NotText: As `render`.
            TooLong: As `render`.
        """
        prompt = sglang_prompt(request, as_parts=self._plain.as_parts_for_sglang, release=release)
        template = self._plain if prompt.tools is None else self._with_tools
        try:
            return self._run(template, _shown_by_sglang(prompt, prompt.tools)), prompt.continued
        except TooLong:
            raise
        except NotText:
            if prompt.tools is None:
                raise
        # Templates that want functions without what is around them.
        functions = [tool["function"] for tool in prompt.tools]
        return self._run(template, _shown_by_sglang(prompt, functions)), prompt.continued

    def _disabled_effort(self) -> str:
        """Return "low" where the effort "none" is refused, or is one of those with which a model thinks."""
        shown = [self._shown_with(effort) for effort in ("none", *_EFFORTS)]
        return "low" if shown[0] is None or shown[0] in shown[1:] else "none"

    def _shown_with(self, effort: str) -> str | None:
        try:
            return self.render({"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort})
        except NotText:
            return None

    def _run(self, template: _Compiled, variables: Mapping[str, Any]) -> str:
        try:
            return self._environment.run(template.template, {**self._special_tokens, "documents": None, **variables})
        except NotText:
            raise
        except Exception as error:  # whatever a template does wrong
            raise NotText(f"the chat template refuses it: {error}") from error


class _Compiled:
    def __init__(self, environment: _Bounded, source: str) -> None:
        self.template = environment.from_string(source)
        tree = environment.parse(source)
        self.as_parts = reads_parts(tree)
        self.as_parts_for_sglang = sglang_reads_parts(source, tree)
        self._knows_developers = "developer" in {node.value for node in tree.find_all(nodes.Const)}

    def shown(self, messages: Any) -> list[dict[str, Any]]:
        """Return messages in the form that the template reads.

        Raises:
            NotText: As `conversation`.
        """
        shown = conversation(messages, as_parts=self.as_parts)
        if self._knows_developers or not any(message["role"] == "developer" for message in shown):
            return shown
        return _one_system_message(shown)


class _Bounded(ImmutableSandboxedEnvironment):
    """The environment in which transformers renders, with a deadline that is looked at with each access and call."""

    def __init__(self, *, plain: bool = False) -> None:
        """Make one.

        Args:
            plain: Without what transformers adds to jinja, as vLLM tries templates.
        """
        extensions = [loopcontrols] if plain else [_Generation, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self._running = threading.local()
        if plain:
            return
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def run(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Return the text that a template puts out.

        Raises:
            TooLong: It takes too long, or puts out too much.
        """
        self._running.until = time.monotonic() + MAX_SECONDS
        written, length = [], 0
        for chunk in template.generate(variables):
            self._check()
            length += len(chunk)
            if length > MAX_CHARACTERS:
                raise TooLong(f"the chat template puts out more than {MAX_CHARACTERS:,} characters")
            written.append(chunk)
        return "".join(written)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._check()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._check()
        return super().getitem(obj, argument)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self._check()
        return super().call(__context, __obj, *args, **kwargs)

    def _check(self) -> None:
        if time.monotonic() > getattr(self._running, "until", float("inf")):
            raise TooLong(f"the chat template takes more than {MAX_SECONDS:g} s")


def _merges_system(source: str) -> bool:
    """Tell whether vLLM takes a template for one that refuses a system message that is not the first."""
    turn = [{"role": "system", "content": "t"}, {"role": "user", "content": "t"}]
    try:
        plain = _Bounded(plain=True)
        plain.run(plain.from_string(source), {"messages": [*turn, *turn], "add_generation_prompt": False})
    except Exception:  # whatever a template does wrong
        return True
    return False


class _Generation(Extension):
    """`{% generation %}` marks what is trained on; it is put out as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own way

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def reads_parts(tree: nodes.Template) -> bool:
    """Tell whether a template reads the contents of messages as lists of parts: it loops over one.

    That is how vLLM decides what a template is shown.
    """
    messages = set(_names_of(tree, {"messages"}))
    each = {loop.target.name for loop in tree.find_all(nodes.For)
            if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in messages)}  # fmt: skip
    in_macros: set[int] = set()
    for macro in tree.find_all(nodes.Macro):
        parameters = _parameters_with_content(tree, macro, each)
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if isinstance(loop.iter, nodes.Name) and loop.iter.name in parameters:
                return True
    return any(
        any(_reads(loop.iter, name, "content") for name in each)
        or (id(loop) not in in_macros and isinstance(loop.iter, nodes.Name) and loop.iter.name == "content")
        for loop in tree.find_all(nodes.For)
    )


def sglang_reads_parts(source: str, tree: nodes.Template) -> bool:
    """Return whether SGLang shows a template the contents of messages as lists of parts: it speaks of what is not text,
    or loops over the content of a variable of one of three names."""
    return any(word in source for word in ("image", "audio", "video", "vision")) or any(
        _reads(loop.iter, name, "content") for loop in tree.find_all(nodes.For) for name in ("message", "msg", "m")
    )


def _shown_by_sglang(prompt: SglangPrompt, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    return prompt.variables | {"messages": prompt.messages, "tools": tools}


def _names_of(tree: nodes.Template, names: set[str]) -> set[str]:
    """With those that the template gives to the same thing, or to a slice of it."""
    while True:
        more = {a.target.name for a in tree.find_all(nodes.Assign)
                if isinstance(a.target, nodes.Name) and any(_reads(a.node, name) for name in names)}  # fmt: skip
        if more <= names:
            return names
        names = names | more


def _parameters_with_content(tree: nodes.Template, macro: nodes.Macro, each: set[str]) -> set[str]:
    own = [parameter.name for parameter in macro.args]
    found = set()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            given = [*zip(own, call.args, strict=False), *((keyword.key, keyword.value) for keyword in call.kwargs)]
            found |= {name for name, value in given if any(_reads(value, one, "content") for one in each)}
    return found.intersection(own)


def _reads(node: nodes.Node | None, name: str, key: str = "") -> bool:
    """Tell whether an expression is a variable (or its `key`), filtered, tested or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        return _reads(node.node, name, key)
    if not key:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == key and _reads(node.node, name)
    return isinstance(node, nodes.Getattr) and node.attr == key and _reads(node.node, name)


def _one_system_message(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of developers as the system's, all of which are one at the begin."""
    named = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    for message in named:
        if message["role"] == "system":
            message.pop("tools", None)
    system = [message for message in named if message["role"] == "system"]
    if system == named[:1]:
        return named
    texts = [text for message in system if (text := _text_of(message["content"]))]
    return [{"role": "system", "content": "\n\n".join(texts)}, *(m for m in named if m["role"] != "system")]


def _text_of(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _mark_end(messages: list[dict[str, Any]]) -> None:
    content: Any = messages[-1]["content"] if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + _FINAL_TAG
    elif content and "text" in content[-1]:
        content[-1]["text"] += _FINAL_TAG
    else:
        raise NotText("there is no final message to continue")


def _until_mark(text: str) -> str:
    at = text.rfind(_FINAL_TAG.strip())
    if at < 0:
        raise NotText("the chat template does not put out the end of the final message")
    return text[:at] if text[at:].startswith(_FINAL_TAG) else text[:at].rstrip()


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> Iterator[str]:
    raise jinja2.TemplateError(message)


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _read_json(path: Path, *, flag: str) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field=flag) from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is not an object", field=flag)
    return document
