"""The speculation benchmark: tasks, tallies, ratios."""

import pytest

from benchmarks.common.clusters import ClusterPlan
from benchmarks.common.progress import SilentProgress
from benchmarks.common.stream import RequestTrace
from benchmarks.spec.figures import Tally, merged
from benchmarks.spec.run import PLAIN, SpecSettings, build_report, many_streams, single_streams
from benchmarks.spec.tasks import SpecTask, all_categories, chosen_categories, load_tasks
from benchmarks.spec.variants import ClusterVariant
from kvrelay.errors import InvalidRequest
from kvrelay.results import Timings, Usage
from tests.unit.benchmarks.fake_client import FakeClient


def trace(step_tokens: list[int], seconds: float, *, drafted: int = 0) -> RequestTrace:
    arrivals = [(0.0, 1)] + [
        (seconds * (index + 1) / len(step_tokens), count) for index, count in enumerate(step_tokens)
    ]
    accepted = sum(step_tokens) - len(step_tokens)
    usage = Usage(draft_tokens=drafted, accepted_tokens=accepted)
    return RequestTrace(0.0, tuple(arrivals), seconds, (), "", usage, Timings())


def tally(step_tokens: list[int], seconds: float, *, drafted: int = 0) -> Tally:
    found = Tally()
    found.add(trace(step_tokens, seconds, drafted=drafted), is_same=True)
    return found


def test_figures_of_a_known_run() -> None:
    found = tally([1, 3, 4, 2], 2.0, drafted=12)
    assert found.tokens_per_step == 2.5
    assert found.acceptance == 0.5
    assert found.tokens_per_s == 5.0
    assert found.accepted_by_position()[:4] == [0.75, 0.5, 0.25, 0.0]


def test_tallies_add_up() -> None:
    total = merged([tally([1, 3], 1.0, drafted=4), tally([1, 1], 3.0, drafted=2)])
    assert (total.num_tasks, total.num_tokens, total.tokens_per_s) == (2, 6, 1.5)
    assert total.acceptance == pytest.approx(2 / 6)


def test_nothing_measured_has_no_acceptance() -> None:
    assert Tally().acceptance is None
    assert Tally().tokens_per_s == 0.0
    assert Tally().accepted_by_position()[0] == 0.0


def test_categories_keep_their_order_and_unknown_ones_are_refused() -> None:
    assert chosen_categories(["rag", "mt_bench"]) == ("mt_bench", "rag")
    assert len(all_categories()) == 7
    assert chosen_categories([]) == all_categories()
    with pytest.raises(InvalidRequest, match="nonsense"):
        chosen_categories(["nonsense"])


def test_drafter_that_workers_do_not_know_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="ngram"):
        SpecSettings(ClusterPlan(), drafters=("nonsense",))


async def test_tasks_fit_the_context_and_the_limit() -> None:
    tasks = await load_tasks(FakeClient(), ["rag", "editing"], 3, output_tokens=40, context=10_000)
    assert [task.category for task in tasks] == ["rag"] * 3 + ["editing"] * 3
    assert all(2 <= task.max_tokens <= 40 for task in tasks)
    assert await load_tasks(FakeClient(), ["rag"], None, output_tokens=40, context=100) == []
    for category in ("rag", "mt_bench"):
        found = await load_tasks(FakeClient(), [category], None, output_tokens=40, context=10_000)
        assert [task.category for task in found] == [category] * 80


async def test_no_task_meets_its_own_earlier_answer() -> None:
    clients = {PLAIN: FakeClient(), "ngram": FakeClient()}
    variants = {name: ClusterVariant(client) for name, client in clients.items()}
    tasks = [SpecTask(str(index), "rag", (index,), 4) for index in range(3)]
    for round_index in range(2):
        await single_streams(variants, tasks, round_index, SilentProgress())
    for client in clients.values():
        seen = [(options["token_ids"], options["cache_salt"]) for options in client.requests]
        assert len(set(seen)) == len(seen) == 6


async def test_answers_that_differ_from_plain_decoding_are_counted() -> None:
    other = FakeClient(lambda _prompt, max_tokens: [(0.0, 1)] * (max_tokens - 1))
    tallies = await single_streams(
        {PLAIN: ClusterVariant(FakeClient()), "ngram": ClusterVariant(other)},
        [SpecTask("1", "rag", (1,), 4)],
        0,
        SilentProgress(),
    )
    assert tallies["ngram", "rag"].num_different == 1
    assert tallies[PLAIN, "rag"].num_different == 0


async def test_many_streams_run_at_once_and_never_ask_the_same_twice() -> None:
    client = FakeClient(lambda _prompt, max_tokens: [(0.005, 1)] * max_tokens)
    tasks = [SpecTask(str(index), category, (index,), 3) for index in range(3) for category in ("rag", "qa")]
    assert await many_streams(ClusterVariant(client), tasks, 8, "salt") > 0
    assert client.most_running == 8
    seen = [(options["token_ids"], options["cache_salt"]) for options in client.requests]
    assert len(seen) >= 16


def test_ratios_have_the_contracts_names() -> None:
    tallies = {
        (PLAIN, "rag"): [tally([1, 1], 2.0)],
        (PLAIN, "editing"): [tally([1, 1], 2.0)],
        ("ngram", "rag"): [tally([1, 1], 1.0)],
        ("ngram", "editing"): [tally([1, 1], 4.0)],
    }
    speeds = {PLAIN: [100.0], "ngram": [110.0]}
    report = build_report(SpecSettings(ClusterPlan()), tallies, speeds)
    assert report.ratios == {
        "ngram_rag": 2.0,
        "ngram_editing": 0.5,
        "worst_category": 0.5,
        "adaptive_16": pytest.approx(1.1),
    }
    fewer = build_report(SpecSettings(ClusterPlan(), num_streams=4), tallies, speeds)
    assert "adaptive_16" not in fewer.ratios, "four streams are not sixteen"
