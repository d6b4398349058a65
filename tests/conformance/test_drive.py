"""Driving a protocol coroutine by hand."""

import pytest

from recover.core.drive import Driver, drive
from recover.core.effects import Agree, AnyEffect, NextBucket


async def _count(limit: int) -> int:
    seen = 0
    while await NextBucket() is not None:
        seen += 1
        if seen > limit:
            raise ValueError("too many")
    return seen if await Agree(True) else -1


def test_drive_answers_every_effect_and_returns_the_result() -> None:
    outcomes = iter([0, 1, None, True])
    asked: list[AnyEffect] = []

    def perform(effect: AnyEffect) -> object:
        asked.append(effect)
        return next(outcomes)

    assert drive(_count(5), perform) == 2
    assert asked == [NextBucket()] * 3 + [Agree(True)]


def test_a_driver_stops_at_each_effect() -> None:
    driver = Driver(_count(5))
    assert (driver.pending, driver.done) == (NextBucket(), False)
    with pytest.raises(AssertionError, match="has not returned"):
        _ = driver.result
    driver.answer(None)
    assert driver.pending == Agree(True)
    driver.answer(False)
    assert driver.done
    assert driver.result == -1
    with pytest.raises(AssertionError, match="has returned"):
        driver.answer(True)


def test_an_exception_of_the_protocol_leaves_the_answer() -> None:
    driver = Driver(_count(0))
    with pytest.raises(ValueError, match="too many"):
        driver.answer(7)


def test_a_protocol_can_be_given_up() -> None:
    driver = Driver(_count(5))
    driver.close()
    with pytest.raises(RuntimeError):
        driver.answer(None)
