"""Tables and calls that both languages read by position agree on the order of their fields."""

import inspect

import pytest

from kvscout_scheduler.costs.time_cost import TimeCostInputs, TimeRow

kvscout_native = pytest.importorskip("kvscout_native")


def test_a_row_of_the_table_has_the_fields_of_both_backends_in_one_order() -> None:
    assert TimeRow._fields == kvscout_native.TIME_ROW_FIELDS


def test_inputs_of_costs_are_passed_in_the_order_of_the_extensions_parameters() -> None:
    parameters = list(inspect.signature(kvscout_native.Scores.seconds).parameters)
    assert tuple(parameters[1:]) == TimeCostInputs._fields
