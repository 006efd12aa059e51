"""Which paths of engines are clients': what is listed, and nothing that only looks like it."""

from __future__ import annotations

import pytest

from kvscout_common.errors import ConfigError, KvscoutError, NotFound, PermissionDenied
from kvscout_gateway.fronts.client_paths import CLIENT_PATHS, ClientPaths


@pytest.mark.parametrize("path", [path for path in CLIENT_PATHS if "*" not in path])
def test_a_listed_path_is_a_clients(path: str) -> None:
    ClientPaths().require(path, is_admin=False)


@pytest.mark.parametrize(
    "path",
    ["/flush_cache", "/sleep", "/wake_up", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/abort_request",
     "/v1/abort_requests", "/v1/admin/x", "/reset_prefix_cache", "/collective_rpc", "/start_profile",
     "/update_weights_from_disk", "/release_memory_occupation", "/get_server_info", "/openapi.json"],
)  # fmt: skip
def test_a_path_of_operators_is_named_as_one(path: str) -> None:
    with pytest.raises(PermissionDenied, match="operators"):
        ClientPaths().require(path, is_admin=False)
    ClientPaths().require(path, is_admin=True)


@pytest.mark.parametrize(("path", "error"), [("/sleep", PermissionDenied), ("/v1/videos", NotFound)])
def test_a_refusal_names_no_key_where_none_is_looked_at(path: str, error: type[KvscoutError]) -> None:
    with pytest.raises(error, match="needs --client-path") as refused:
        ClientPaths().require(path, is_admin=None)
    assert "key" not in refused.value.message


@pytest.mark.parametrize(
    "path",
    ["/v1/nothing", "/v1/responses/a/b/c", "/v1/responses/..", "/v1/responses/../sleep", "/v1/responses/%2e%2e",
     "/v1/responses/", "/v1/responses/a?b", "/v1//embeddings", "//sleep", "/V1/embeddings", "/v1/embeddings\n",
     "/v1/responses/a\n", "", "*", "http://h/v1/embeddings"],
)  # fmt: skip
def test_what_is_not_listed_does_not_exist(path: str) -> None:
    with pytest.raises(NotFound):
        ClientPaths().require(path, is_admin=False)


def test_a_star_stands_for_one_part() -> None:
    opened = ClientPaths(["/v1/videos/*/content", "/v1/files"])
    for path in ("/v1/videos/video_1-a.b/content", "/v1/files", "/v1/responses/resp_1", "/v1/embeddings"):
        assert path in opened
    for path in ("/v1/videos/a/b/content", "/v1/videos//content", "/v1/videos/../content", "/v1/files/x"):
        assert path not in opened


@pytest.mark.parametrize(
    "path", ["", "v1/files", "/", "/v1/", "/v1/**", "/v1/../x", "/v1/.*", "/v1/%73leep", "/v1/a b"]
)
def test_what_is_no_path_cannot_be_opened(path: str) -> None:
    with pytest.raises(ConfigError, match="client_path"):
        ClientPaths([path])
