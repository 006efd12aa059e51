"""A wait in the queue ends with the longest wait or with the request's deadline, and says which."""

from __future__ import annotations

import time

from kvscout_common.errors import DeadlineExceeded
from kvscout_gateway.upstreams.failover import is_member_fault
from kvscout_gateway.upstreams.scheduler.queue_wait import QueueWait, WaitedTooLong


def test_a_wait_that_ends_with_the_deadline_says_so() -> None:
    wait = QueueWait(3600.0, time.monotonic() + 1000.0)
    assert 0 < wait.seconds_left <= 1000.0
    over = wait.over()
    assert isinstance(over, DeadlineExceeded)
    assert not is_member_fault(over), "no scheduler is at fault"


def test_a_wait_that_is_shorter_than_the_deadline_is_to_be_tried_again() -> None:
    wait = QueueWait(1000.0, time.monotonic() + 3600.0)
    assert 0 < wait.seconds_left <= 1000.0
    over = wait.over()
    assert isinstance(over, WaitedTooLong)
    assert over.retry_after_seconds


def test_a_deadline_that_has_passed_leaves_no_time() -> None:
    assert QueueWait(1000.0, time.monotonic() - 1.0).seconds_left == 0.0
