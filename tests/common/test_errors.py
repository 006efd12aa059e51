"""The exception tree and its table."""

import inspect

import grpc
import pytest

from kvscout_common import errors
from kvscout_common.errors import ConfigError, InvalidArgument, KvscoutError
from kvscout_common.transport.statuses import STATUS_CODES, from_status, status_code

ALL = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, KvscoutError) and kind is not KvscoutError
]


def test_every_exception_of_the_tree_has_its_own_line_in_the_table() -> None:
    assert set(STATUS_CODES) == set(ALL)


def test_the_tree_in_the_docstring_names_every_exception() -> None:
    assert errors.__doc__ is not None
    assert all(kind.__name__ in errors.__doc__ for kind in ALL)


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind is not ConfigError])
def test_client_and_server_raise_the_same_exception(kind: type[KvscoutError]) -> None:
    assert type(from_status(status_code(kind("x")), "x", raised=kind.__name__)) is kind


def test_an_unnamed_unavailable_is_not_taken_for_draining() -> None:
    assert type(from_status(grpc.StatusCode.UNAVAILABLE, "x")) is errors.Unavailable


def test_a_subclass_outside_the_tree_takes_the_code_of_its_parent() -> None:
    class Refused(InvalidArgument):
        pass

    assert status_code(Refused("x")) is grpc.StatusCode.INVALID_ARGUMENT


def test_codes_that_kvscout_never_sends_become_internal_errors() -> None:
    assert isinstance(from_status(grpc.StatusCode.DATA_LOSS, "x"), errors.InternalError)


def test_the_field_travels_in_front_of_the_message() -> None:
    sent = InvalidArgument("must not be empty", field="model")
    assert str(sent) == "model: must not be empty"
    received = from_status(grpc.StatusCode.INVALID_ARGUMENT, str(sent))
    assert (received.field, received.message) == ("model", "must not be empty")
    prose = from_status(grpc.StatusCode.INVALID_ARGUMENT, "this is: prose")
    assert (prose.field, prose.message) == (None, "this is: prose")
