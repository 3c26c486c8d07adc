"""Threads of a pipeline's calls."""

import threading

from retime.mechanisms.pipeline.calls import HERE, SuspendedCall, Workers
from support.time_limits import limit_s


def test_a_thread_that_is_at_its_task_when_all_are_stopped_ends_behind_it() -> None:
    workers, begun, may_end = Workers(), threading.Event(), threading.Event()
    serving: list[threading.Thread] = []

    def task() -> None:
        serving.append(threading.current_thread())
        begun.set()
        may_end.wait(limit_s(30))

    workers.run(task)
    assert begun.wait(limit_s(30))
    workers.stop()
    may_end.set()
    serving[0].join(limit_s(30))
    assert not serving[0].is_alive()
    begun.clear()
    workers.run(task)  # they may be used again
    assert begun.wait(limit_s(30))
    assert serving[1] is not serving[0]
    workers.stop()
    serving[1].join(limit_s(30))
    assert not serving[1].is_alive()


def test_a_call_that_is_closed_ends_though_a_finally_block_stops_again() -> None:
    workers, ended, serving = Workers(), threading.Event(), list[threading.Thread]()

    def stops_at_two_layers() -> None:
        call = HERE.call
        serving.append(threading.current_thread())
        try:
            call.stop("the first layer")
        finally:
            try:
                call.stop("the second layer, in what cleans up")
            finally:
                ended.set()

    call = SuspendedCall(stops_at_two_layers, workers, 0)
    assert call.resume() == "the first layer"
    call.close()
    assert ended.wait(limit_s(30))
    workers.stop()
    serving[0].join(limit_s(30))
    assert not serving[0].is_alive()
