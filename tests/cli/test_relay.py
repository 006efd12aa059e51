"""The services' flags on `kvscout up`."""

from __future__ import annotations

from importlib import import_module

import click
import pytest

from kvscout_cli.commands.up import command
from kvscout_cli.relay import SERVICES, given_words, relayed_flags
from kvscout_common.settings.flags import SERVER, SectionedOption


def words(services: str, *arguments: str) -> tuple[str, ...]:
    context = command.make_context("up", list(arguments))
    return given_words(context, relayed_flags(), *services.split())


def test_only_what_was_given_is_passed_on_and_only_to_who_has_it() -> None:
    assert words("scheduler") == ()
    given = ("--router-mode", "random", "--router-temperature", "0.5", "--migration-limit", "2")
    assert words("scheduler", *given) == ("--router-mode", "random", "--router-temperature", "0.5")
    assert words("gateway", *given) == ("--migration-limit", "2")
    assert words("indexer", *given) == ()


def test_a_flag_of_several_services_reaches_each_in_a_form_all_of_them_read() -> None:
    assert words("scheduler", "--lease-seconds", "60") == ("--lease-seconds", "60")
    assert words("gateway", "--lease-seconds", "60") == ("--lease-seconds", "60")


def test_one_process_has_the_flags_of_all_services_each_once() -> None:
    given = ("--migration-limit", "2", "--lease-seconds", "60", "--router-mode", "random")
    assert set(words("scheduler indexer gateway", *given)) == set(given)
    assert len(words("scheduler indexer gateway", *given)) == len(given)


def test_a_flag_of_two_names_is_taken_under_each() -> None:
    for name in ("--inference-objective", "--endpoint-picker-objective"):
        assert words("gateway", name, "chat=1") == ("--inference-objective", "chat=1")


def test_switches_are_passed_without_a_value() -> None:
    assert words("scheduler", "--no-track-active-blocks") == ("--no-track-active-blocks",)


def test_a_value_out_of_range_is_refused_before_anything_starts() -> None:
    with pytest.raises(click.UsageError):
        words("gateway", "--migration-limit", "99")


@pytest.mark.parametrize("service", SERVICES)
def test_every_flag_that_is_no_servers_own_or_the_stacks_is_taken(service: str) -> None:
    main: click.Command = import_module(f"kvscout_{service}.main").main
    own = {
        option.name for option in main.params if isinstance(option, SectionedOption) and option.section != SERVER
    } - {"indexer", "no_indexer", "scheduler", "tls_ca", "tls_client_cert", "tls_client_key", "token_file"}
    taken = {flag.option.name for flag in relayed_flags() if service in flag.services}
    assert taken == own
