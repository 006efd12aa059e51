"""A mocker's configuration for tests of bodies."""

from __future__ import annotations

import pytest

from kvscout_mocker.config import MockerConfig, config_from_flags
from kvscout_mocker.main import main


@pytest.fixture(scope="module")
def config() -> MockerConfig:
    """Two adapters, 1,024 tokens."""
    arguments = ["--lora", "first", "--lora", "second", "--num-gpu-blocks", "65"]
    with main.make_context("mocker", arguments) as context:
        values = dict(context.params)
    values.pop("log_level")
    return config_from_flags(**values)
