"""A real vLLM's render service, and the models without weights that it is given."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from support.conversations import Conversation
from support.free_ports import free_ports

DATA: Final = Path(__file__).parents[1] / "data" / "vllm_tokens"
RECORDED: Final = DATA / "recorded.json"
"""Conversations of text."""
IMAGES: Final = DATA / "images.json"
"""Those with images."""
VISION_TEMPLATE: Final = "parts"
PATHS = {
    "chat": "/v1/chat/completions/render",
    "messages": "/v1/messages/render",
    "responses": "/v1/responses/render",
}
MODEL = "tiny"
START_SECONDS = 300.0
TEXT_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
}


def vision_model() -> dict[str, Any]:
    """Return the configuration of a model that sees images, of 28 pixels and more a side."""
    added = json.loads((DATA / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    return {
        **TEXT_MODEL,
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_config": {**vision, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_chans": 3},
    }


def make_vision_model(folder: Path) -> None:
    """Write a model without weights that sees images."""
    make_model(folder, VISION_TEMPLATE, vision_model())
    sizes = {"min_pixels": 784, "max_pixels": 50_176, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    kind = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps({**kind, **sizes}))


def sees_images(venv: Path) -> bool:
    """Tell whether a vLLM can process images: torchvision is not part of it."""
    command = [str(venv / "bin" / "python"), "-c", "import torchvision"]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def make_model(folder: Path, template: str, config: Mapping[str, Any] = TEXT_MODEL) -> None:
    """Write a model without weights: its configuration, its tokenizer and a template."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes((DATA / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "pad_token": "<pad>",
                "clean_up_tokenization_spaces": False,
            }
        )
    )
    (folder / "chat_template.jinja").write_bytes((DATA / f"{template}.jinja").read_bytes())


@contextlib.contextmanager
def renderer(venv: Path, folder: Path) -> Iterator[int]:
    """Run `vllm launch render` for a model; yields its port."""
    [port] = free_ports(1)
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    where = ("--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL)
    vllm = str(venv / "bin" / "vllm")
    command = [vllm, "launch", "render", str(folder), *where, *tools, "--max-model-len", "4096"]
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(command, env={**os.environ, **quiet}, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_SECONDS
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"vLLM does not start with {folder}")
            time.sleep(0.5)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def _healthy(port: int) -> bool:
    try:
        return _call(port, "GET", "/health", None)[0] == 200
    except OSError:
        return False


def _call(port: int, method: str, path: str, body: Any) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def rendered(port: int, conversation: Conversation) -> dict[str, Any]:
    """Return what vLLM makes of a conversation: its tokens and images, or its refusal."""
    body = {**conversation.request, "mm_payload": "none"}
    status, page = _call(port, "POST", PATHS[conversation.dialect], body)
    if status != 200:
        return {"refused": status, "says": page.decode()[:300]}
    answer = json.loads(page)
    shown = {"token_ids": answer["token_ids"]}
    if answer.get("features"):
        shown["features"] = {name: answer["features"][name] for name in ("mm_hashes", "mm_placeholders")}
    return shown
