"""Flags become one configuration, or an error that names the flag."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from kvscout_common.errors import ConfigError
from kvscout_mocker.config import MockerConfig, config_from_flags, flags
from kvscout_mocker.events import EventFormat
from kvscout_mocker.main import main


def parse(*arguments: str) -> MockerConfig:
    @click.command()
    @flags
    def command(**values: object) -> MockerConfig:
        return config_from_flags(**values)  # type: ignore[arg-type]

    config: MockerConfig = command.main(list(arguments), standalone_mode=False)
    return config


def test_defaults_bind_loopback_and_let_a_request_be_half_the_cache() -> None:
    config = parse()
    assert config.host == "127.0.0.1"
    assert (config.engine.block_size, config.engine.num_gpu_blocks) == (16, 4096)
    assert config.engine.max_model_len == 32_768
    assert parse("--num-gpu-blocks", "65").engine.max_model_len == 64 * 16


def test_speedup_divides_every_duration() -> None:
    slow, fast = parse().engine.cost, parse("--speedup", "4").engine.cost
    assert fast.step_seconds(1000, 10) == pytest.approx(slow.step_seconds(1000, 10) / 4)


def test_event_format_is_given_in_lower_case() -> None:
    assert parse("--event-format", "array").event_format is EventFormat.ARRAY


def test_without_a_hash_seed_every_rank_hashes_differently() -> None:
    assert len({parse().rank_hash_seed() for _ in range(4)}) == 4
    assert parse("--hash-seed", "7").rank_hash_seed() == 7


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--max-model-len", "70000"], "max_model_len"),
        (["--max-num-batched-tokens", "100"], "max_num_batched_tokens"),
        (["--model", "a", "--lora", "a"], "lora"),
        (["--model", ""], "model"),
        (["--dp-size", "4", "--events-port", "65533"], "events_port"),
        (["--dp-size", "4", "--events-port", "5557", "--replay-port", "5559"], "replay_port"),
    ],
)
def test_a_contradiction_names_the_flag(arguments: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(*arguments)
    assert error.value.field == field


def test_the_command_reads_the_environment_and_explains_what_is_wrong() -> None:
    result = CliRunner().invoke(main, [], env={"KVSCOUT_MOCKER_MAX_MODEL_LEN": "70000"})
    assert result.exit_code == 2
    assert "max_model_len: 70000 tokens do not fit" in result.output


def test_the_groups_of_a_hybrid_model_share_the_blocks() -> None:
    config = parse("--num-gpu-blocks", "65", "--sliding-window", "128")
    assert (config.engine.sliding_window, config.engine.max_model_len) == (128, 32 * 16)
    with pytest.raises(ConfigError, match="sliding_window"):
        parse("--sliding-window", "1")


def test_states_take_two_blocks_of_a_request_and_steps_as_long_as_blocks() -> None:
    config = parse("--num-gpu-blocks", "65", "--state-space")
    assert (config.engine.state_space, config.engine.max_model_len) == (True, 62 * 16)
    with pytest.raises(ConfigError, match="state_space"):
        parse("--state-space", "--sliding-window", "128")
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        parse("--state-space", "--max-num-seqs", "4", "--max-num-batched-tokens", "15")
