"""Ctrl-C waits for the end of what must not be torn apart, and is never lost."""

from __future__ import annotations

import signal
import threading

import pytest

from specdec.interrupts import uninterrupted


def test_ctrl_c_comes_after_the_block() -> None:
    done = []

    def act() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("whole")
        done.append("never")

    with pytest.raises(KeyboardInterrupt):
        act()
    assert done == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_inner_block_leaves_it_to_the_outer_one() -> None:
    done = []

    def act() -> None:
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
            done.append("outer goes on")

    with pytest.raises(KeyboardInterrupt):
        act()
    assert done == ["outer goes on"]


def test_a_failing_block_is_not_hidden() -> None:

    def fail(with_interrupt: bool) -> None:
        with uninterrupted():
            if with_interrupt:
                signal.raise_signal(signal.SIGINT)
            raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        fail(with_interrupt=False)
    with pytest.raises(KeyboardInterrupt) as caught:
        fail(with_interrupt=True)
    assert isinstance(caught.value.__context__, ValueError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_callers_own_handler_hears_of_it() -> None:
    heard = []
    earlier = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            assert not heard
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, earlier)


def test_other_threads_and_ignored_signals_are_left_alone() -> None:
    failures: list[BaseException] = []

    def enter() -> None:
        try:
            with uninterrupted():
                pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert not failures
    earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, earlier)
