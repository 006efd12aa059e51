"""The table that both languages read by position has its fields in one order."""

import pytest

from kvscout_scheduler.costs.time_cost import TimeRow

kvscout_native = pytest.importorskip("kvscout_native")


def test_a_row_of_the_table_has_the_fields_of_both_backends_in_one_order() -> None:
    assert TimeRow._fields == kvscout_native.TIME_ROW_FIELDS
