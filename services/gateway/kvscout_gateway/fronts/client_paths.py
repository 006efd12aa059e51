"""Which paths of engines are clients': one list for every front. Pure.

An engine's other paths are its operators': they put it to sleep, load adapters, forget its cache or end it, and the
next release may add more. So a path is a client's only if it is listed here, or opened by `--client-path`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import unquote

from kvscout_common.errors import ConfigError, KvscoutError, NotFound, PermissionDenied
from kvscout_gateway.values.dialects import API_DIALECTS, COUNT_PATHS

CLIENT_PATHS: Final = (
    *API_DIALECTS, *COUNT_PATHS,
    "/v1/completions/render", "/v1/chat/completions/render", "/v1/chat/completions/batch",
    "/v1/responses/*", "/v1/responses/*/cancel", "/v1/responses/*/input_items",
    "/v1/embeddings", "/v2/embed", "/pooling", "/v1/pooling",
    "/classify", "/v1/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/v1/moderations",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech",
    "/v1/images/generations", "/v1/images/edits", "/v1/images/variations",
    "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize",
    "/invocations", "/generate",
)  # fmt: skip
"""Paths of vLLM and SGLang that run a model for a client; `*` stands for one part of a path."""
OPERATORS: Final = re.compile(
    r"/(?:v1/)?(?:sleep|wake_up|is_sleeping|pause|resume|is_paused|pause_generation|continue_generation|abort_requests?"
    r"|(?:un)?load_lora_adapter|(?:reset|flush|clear)_[a-z_]*cache|flush_cache|(?:start|stop)_profile|collective_rpc"
    r"|update_weight[a-z_]*|[a-z]+_weights?_[a-z_]+|(?:release|resume)_memory_occupation|slow_down|freeze_gc"
    r"|configure_logging|set_internal_state|scale_elastic_ep|is_scaling_elastic_ep|(?:open|close)_session"
    r"|get_[a-z_]+|server_info|model_info|version|load|metrics|ping|health[a-z_]*|docs|redoc|openapi\.json)"
    r"|/v1/admin(?:/.*)?"
)
"""Known paths that operators use: said of them is that they are, of all others that there is no such path. Nothing
depends on it but the words."""
_PART: Final = "[A-Za-z0-9_~:-][A-Za-z0-9_.~:-]*"
_TEMPLATE: Final = re.compile(rf"(?:/(?:{_PART}|\*))+")
FLAG: Final = "client_path"
OPENS: Final = "--client-path"
MODELS: Final = "/v1/models"
"""Lists the models, and has a page of each below it."""
HEALTH: Final = "/health"


class UnknownPath(NotFound):
    """No client has such a path."""


class ClientPaths:
    """The paths that clients may ask for. Nothing is unescaped, so nothing but what is listed can be meant."""

    def __init__(self, opened: Iterable[str] = ()) -> None:
        """Take the list.

        Args:
            opened: Further paths; `*` stands for one part.

        Raises:
            ConfigError: One of them is no path.
        """
        opened = tuple(opened)
        for path in opened:
            if not _TEMPLATE.fullmatch(path):
                raise ConfigError(f"{path!r} is not a path such as /v1/videos or /v1/videos/*", field=FLAG)
        listed = (*CLIENT_PATHS, *opened)
        self._exact = frozenset(path for path in listed if "*" not in path)
        patterns = (re.escape(path).replace(r"\*", _PART) for path in listed if "*" in path)
        self._pattern = re.compile("|".join(patterns))

    def __contains__(self, path: str) -> bool:
        return path in self._exact or self._pattern.fullmatch(path) is not None

    def require(self, path: str, *, is_admin: bool | None) -> None:
        """Refuse a path that is not the caller's to ask for.

        Args:
            path: As it came, without the query.
            is_admin: The caller has shown a key of the role admin; None = nobody looks at callers' keys here.

        Raises:
            PermissionDenied: The path is for operators.
            NotFound: No client has such a path.
        """
        if not is_admin and path not in self:
            raise _refusal(path[:200], OPENS if is_admin is None else f"an API key of the role admin, or {OPENS}")


def _refusal(path: str, needed: str) -> KvscoutError:
    if OPERATORS.fullmatch(path):
        return PermissionDenied(f"{path} is for operators: it needs {needed}")
    return UnknownPath(f"the gateway has no path {path}; what an engine has beside the known ones needs {needed}")


def model_named(path: str) -> str:
    """Return the model that a path below `MODELS` names, whose slashes may be escaped; "" = none."""
    if not path.startswith(f"{MODELS}/"):
        return ""
    name = unquote(path.removeprefix(f"{MODELS}/"))
    # Behind a balancer that resolves dots it would be another path.
    parts = name.replace("\\", "/").split("/")
    return "" if "%" in name or not name.isprintable() or {"", ".", ".."} & set(parts) else name
