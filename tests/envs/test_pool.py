import threading
import time

import pytest

from empo2_jax.envs.pool import Pool
from empo2_jax.errors import EnvError


class Fake:
    def __init__(self) -> None:
        self.usable = True

    @property
    def resident_mb(self) -> float:
        return 100.0

    def kill(self) -> None:
        self.usable = False


def test_reuses_an_idle_worker_and_replaces_a_dead_one():
    pool = Pool(Fake, size=1)
    first = pool.lease()
    pool.give_back(first)
    assert pool.lease() is first
    first.kill()
    pool.give_back(first)
    assert pool.lease() is not first
    assert pool.started == 2


def test_an_idle_worker_that_died_is_not_leased():
    pool = Pool(Fake, size=2)
    worker = pool.lease()
    pool.give_back(worker)
    worker.kill()
    assert pool.lease().usable


def test_keeps_at_most_size_idle():
    pool = Pool(Fake, size=1)
    one, two = pool.lease(), pool.lease()
    pool.give_back(one)
    pool.give_back(two)
    assert (one.usable, two.usable) == (True, False)


def test_close_kills_leased_and_idle_and_refuses_leases():
    pool = Pool(Fake, size=2)
    leased, idle = pool.lease(), pool.lease()
    pool.give_back(idle)
    pool.close()
    pool.close()
    assert not leased.usable and not idle.usable
    with pytest.raises(EnvError, match="closed"):
        pool.lease()


def test_at_most_two_start_at_once():
    running, most, lock = 0, 0, threading.Lock()

    def start() -> Fake:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return Fake()

    pool = Pool(start, size=8)
    threads = [threading.Thread(target=pool.lease) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 2
    assert pool.started == 8


def test_events_tell_starts_retirements_and_what_environments_note():
    pool = Pool(Fake, size=1)
    worker = pool.lease()
    worker.kill()
    pool.give_back(worker)
    pool.lease()
    pool.note("episodes recovered")
    assert pool.events == {"started": 2, "retired": 1, "episodes recovered": 1}
    pool.events.clear()  # a copy
    assert pool.started == 2


def test_simulators_that_fail_one_after_another_end_the_pool_with_one_clear_error():
    pool = Pool(Fake, size=1, failures=3)
    for number in range(3):
        pool.fail(pool.lease(), f"death {number}")
    with pytest.raises(EnvError, match=r"3 simulators failed one after another.*the last one: death 2"):
        pool.lease()
    assert (pool.started, pool.events["failed"], pool.events["retired"]) == (3, 3, 3)


def test_one_that_works_in_between_starts_the_count_again():
    pool = Pool(Fake, size=1, failures=3)
    for _ in range(5):
        one, two = pool.lease(), pool.lease()
        pool.fail(one, "died")
        pool.fail(two, "died")
        assert pool.figures().failed_in_a_row == 2
        pool.give_back(pool.lease())
    assert (pool.figures().failed_in_a_row, pool.events["failed"]) == (0, 10)


def test_starts_that_fail_count_and_are_not_tried_for_ever():
    tries = []

    def start() -> Fake:
        tries.append(1)
        raise EnvError("no Java")

    pool = Pool(start, size=1)
    for _ in range(40):
        with pytest.raises(EnvError, match="no Java"):
            pool.lease()
    assert len(tries) == 16


def test_figures_tell_what_is_in_use_and_how_long_leases_took():
    def start() -> Fake:
        time.sleep(0.05)
        return Fake()

    pool = Pool(start, size=2)
    one, _ = pool.lease(), pool.lease()
    pool.give_back(one)
    figures = pool.figures()
    assert (figures.leased, figures.idle, figures.resident_mb, figures.largest_mb) == (1, 1, 200.0, 100.0)
    assert figures.wait_s >= 0.1
