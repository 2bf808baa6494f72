"""The ladder's figures and its work."""

from benchmarks.common.clusters import ClusterPlan
from benchmarks.ladder.local import Measured
from benchmarks.ladder.run import FULL, NAIVE, RUNGS, LadderSettings, build_report
from benchmarks.ladder.work import make_work
from engine.model.files.source import resolve_model
from kvrelay.text.tokenizer import load_tokenizer


def test_factor_is_over_the_first_rung_whatever_was_measured_of_it() -> None:
    measured = {rung: [Measured(100, 1.0, is_same=True)] for rung in RUNGS}
    measured[NAIVE] = [Measured(4, 2.0, is_same=True)]
    measured[FULL] = [Measured(300, 1.0, is_same=False)]
    report = build_report(LadderSettings(ClusterPlan()), measured)
    assert report.ratios == {"full_over_naive": 150.0}
    assert [row["rung"] for row in report.rows] == list(RUNGS)
    assert [row["factor_over_naive"] for row in report.rows] == [1.0, 50.0, 50.0, 50.0, 50.0, 150.0]
    assert report.rows[0]["factor_over_previous"] is None
    assert report.rows[-1]["factor_over_previous"] == 3.0
    assert [row["is_same_answer"] for row in report.rows] == [True] * 5 + [False]


def test_all_prompts_begin_with_the_document_and_differ() -> None:
    tokenizer = load_tokenizer(resolve_model("smollm2").path)
    work = make_work(tokenizer, num_streams=20, prefix_tokens=100, output_tokens=8)
    assert len(set(work.prompts)) == 20
    assert all(prompt[: len(work.prefix)] == work.prefix for prompt in work.prompts)
    assert 90 <= len(work.prefix) <= 150
