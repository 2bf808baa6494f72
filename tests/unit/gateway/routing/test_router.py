"""Where requests go: load, limits, who is avoided, and the pull of a known prefix."""

from dataclasses import replace

import pytest

from engine.types import RequestId, WorkerId
from engine.worker_types import WorkerLoad, WorkerRole
from gateway.routing.affinity import PrefixAffinity, prefix_keys
from gateway.routing.router import AffinityLimits, Router
from gateway.workers.mailbox import Mailbox
from gateway.workers.session import WorkerSession
from kvrelay.errors import WorkerUnavailable
from tests.unit.gateway.builders import OfflinePool, make_request

OFF = AffinityLimits(capacity=0)


def occupy(session: WorkerSession, count: int, num_tokens: int = 1) -> None:
    for index in range(count):
        session.attach(RequestId(1000 + index), Mailbox(), num_tokens)


def placed(router: Router, **kwargs: object) -> str:
    return router.place(make_request(), **kwargs).info.worker_id  # type: ignore[arg-type]  # passes avoid through


def test_least_loaded_decode_worker_is_chosen() -> None:
    pool = OfflinePool()
    occupy(pool.add("a"), 3)
    occupy(pool.add("b"), 1)
    occupy(pool.add("c"), 2)
    assert placed(Router(pool, OFF)) == "b"


def test_worker_with_more_free_blocks_is_chosen() -> None:
    pool = OfflinePool()
    pool.add("a").load = WorkerLoad(num_free_blocks=10, num_blocks=64)
    pool.add("b").load = WorkerLoad(num_free_blocks=40, num_blocks=64)
    assert placed(Router(pool, OFF)) == "b"


def test_load_is_relative_to_the_workers_size() -> None:
    pool = OfflinePool()
    occupy(pool.add("small", max_num_seqs=4), 2)
    occupy(pool.add("large", max_num_seqs=64), 8)
    assert placed(Router(pool, OFF)) == "large"


def test_requests_of_other_gateways_count() -> None:
    pool = OfflinePool()
    pool.add("a").load = WorkerLoad(num_running=6, num_free_blocks=64, num_blocks=64)
    occupy(pool.add("b"), 1)
    assert placed(Router(pool, OFF)) == "b"


def test_worker_without_room_for_the_prompt_comes_last() -> None:
    pool = OfflinePool()
    full = pool.add("a")
    full.load = WorkerLoad(num_free_blocks=2, num_blocks=64)
    occupy(pool.add("b"), 8)
    assert placed(Router(pool, OFF)) == "b"
    pool.session(WorkerId("b")).is_open = False  # type: ignore[union-attr]  # it was added above
    assert placed(Router(pool, OFF)) == "a"


def test_draining_and_unconnected_workers_get_nothing() -> None:
    pool = OfflinePool()
    pool.add("a").load = WorkerLoad(is_draining=True)
    pool.add("b").is_drain_announced = True
    pool.add("c").is_open = False
    with pytest.raises(WorkerUnavailable):
        placed(Router(pool, OFF))


def test_worker_that_can_never_hold_the_request_gets_nothing() -> None:
    pool = OfflinePool()
    pool.add("short", context_length=100)
    router = Router(pool, OFF)
    assert router.place(make_request(40, max_tokens=60)).info.worker_id == "short"
    with pytest.raises(WorkerUnavailable):
        router.place(make_request(40, max_tokens=61))
    pool.add("few blocks", num_blocks=6)
    with pytest.raises(WorkerUnavailable):
        router.place(make_request(40, max_tokens=61))


def test_avoided_decode_worker_is_taken_only_where_there_is_no_other() -> None:
    pool = OfflinePool()
    pool.add("a")
    router = Router(pool, OFF)
    avoid = {WorkerId("a")}
    assert placed(router, avoid=avoid) == "a"
    assert not router.has_decode_besides(make_request(), avoid)
    occupy(pool.add("b"), 5)
    assert placed(router, avoid=avoid) == "b"
    assert router.has_decode_besides(make_request(), avoid)


def test_prefill_worker_with_fewest_outstanding_tokens_is_chosen() -> None:
    pool = OfflinePool()
    pool.add("decode")
    occupy(pool.add("p", WorkerRole.PREFILL), 1, num_tokens=300)
    occupy(pool.add("q", WorkerRole.PREFILL), 2, num_tokens=100)
    pool.add("r", WorkerRole.PREFILL).load = WorkerLoad(num_waiting_tokens=250)
    chosen = Router(pool, OFF).place_prefill(make_request())
    assert chosen is not None
    assert chosen.info.worker_id == "q"


def test_avoided_prefill_worker_is_never_taken() -> None:
    pool = OfflinePool()
    pool.add("decode")
    pool.add("p", WorkerRole.PREFILL)
    assert Router(pool, OFF).place_prefill(make_request(), avoid={WorkerId("p")}) is None


def test_known_prefix_draws_until_its_worker_is_much_busier() -> None:
    pool = OfflinePool()
    a, b = pool.add("a"), pool.add("b")
    router = Router(pool)
    occupy(b, 1)
    assert placed(router) == "a"
    occupy(a, 3)
    assert placed(router) == "a"
    occupy(a, 5)
    assert placed(router) == "b"
    # It follows where the prefix was computed last.
    assert placed(router) == "b"


def test_prefix_of_another_salt_does_not_draw() -> None:
    keys = prefix_keys(range(64), "")
    assert len(keys) == 3
    assert keys == prefix_keys([*range(64), 5], "")
    assert not set(keys) & set(prefix_keys(range(64), "salt"))
    assert prefix_keys(range(15), "") == []


def test_worker_that_went_away_is_forgotten() -> None:
    affinity = PrefixAffinity(10)
    affinity.remember([1, 2], WorkerId("a"))
    affinity.remember([2, 3], WorkerId("b"))
    assert affinity.preferred([1, 2, 3]) == "b"
    affinity.forget_worker(WorkerId("b"))
    assert affinity.preferred([1, 2, 3]) == "a"
    assert affinity.preferred([2, 3]) is None


def test_least_recently_used_prefixes_are_forgotten() -> None:
    affinity = PrefixAffinity(3)
    for key in (1, 2, 3):
        affinity.remember([key], WorkerId("a"))
    affinity.remember([1], WorkerId("b"))
    affinity.remember([4], WorkerId("a"))
    assert len(affinity) == 3
    assert affinity.preferred([2]) is None
    assert affinity.preferred([1]) == "b"


def test_equal_workers_take_turns() -> None:
    """Requests that come one by one, each after the end of the one before, meet idle workers only."""
    pool = OfflinePool()
    for name in ("a", "b", "c"):
        pool.add(name)
    router = Router(pool, OFF)
    assert [placed(router) for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_stalled_worker_gets_nothing() -> None:
    pool = OfflinePool()
    pool.add("a").load = WorkerLoad(is_stalled=True)
    pool.add("b").is_stall_announced = True
    with pytest.raises(WorkerUnavailable):
        placed(Router(pool, OFF))
    pool.add("c")
    assert placed(Router(pool, OFF)) == "c"


def test_what_every_chat_begins_with_draws_nobody() -> None:
    """Sixteen different chats under one template: no worker may get more than nine of them."""
    template = tuple(range(40))
    pool = OfflinePool()
    for name in ("a", "b"):
        pool.add(name, context_length=4096)
    router = Router(pool, common_prefix=template)
    chats = [(*template, *range(100 + 50 * index, 140 + 50 * index)) for index in range(16)]
    names = [router.place(replace(make_request(), token_ids=chat)).info.worker_id for chat in chats]
    assert max(names.count(WorkerId(name)) for name in ("a", "b")) <= 9
    # The next turn of each goes where the last one was.
    turns = [(*chat, *range(90, 99)) for chat in reversed(chats)]
    again = [router.place(replace(make_request(), token_ids=turn)).info.worker_id for turn in turns]
    assert again == names[::-1]


def test_prompt_that_leaves_the_template_early_is_told_apart_from_there() -> None:
    template = tuple(range(40))
    own = (*range(10), *range(500, 560))
    other = (*range(10), *range(700, 760))
    assert prefix_keys(own, "", template) == prefix_keys(own[10:], "")
    assert set(prefix_keys(own, "", template)).isdisjoint(prefix_keys(other, "", template))
    assert prefix_keys(template, "", template) == []
