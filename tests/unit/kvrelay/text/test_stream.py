"""Incremental decoding equals decoding the whole, with stop strings wherever they fall."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.text.stream import TextStream
from kvrelay.text.tokenizer import Tokenizer, load_tokenizer

from .gguf_files import write_gguf
from .test_gguf_tokenizer import spm_metadata

STOPS = st.lists(st.text(alphabet="ab\n é", min_size=1, max_size=4), max_size=3)


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_gguf(tmp_path_factory.mktemp("spm") / "model.gguf", spm_metadata()))


def run(stream: TextStream, token_ids: Sequence[int]) -> str:
    return "".join(stream.push(token_id).text for token_id in token_ids) + stream.flush()


def cut_at_first_stop(text: str, stops: Sequence[str], include_stop_str: bool) -> tuple[str, str | None]:
    """Read character by character; the first stop string that is complete wins, the longest of several."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end if include_stop_str else end - len(longest)], longest
    return text, None


def check(tokenizer: Tokenizer, token_ids: list[int], stops: list[str], include: bool, skip: bool) -> None:
    stream = TextStream(tokenizer, stops, include_stop_str=include, skip_special_tokens=skip)
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip, is_continuation=True)
    expected, matched = cut_at_first_stop(whole, stops, include)
    assert run(stream, token_ids) == expected
    assert stream.matched_stop == matched


@given(token_ids=st.lists(st.integers(0, 49_200), max_size=30), stops=STOPS, include=st.booleans(), skip=st.booleans())
def test_random_tokens_of_smollm2(
    smollm2: Tokenizer, token_ids: list[int], stops: list[str], include: bool, skip: bool
) -> None:
    check(smollm2, token_ids, stops, include, skip)


@given(text=st.text(alphabet="ab\n é🙂a", max_size=30), stops=STOPS, include=st.booleans())
def test_text_of_smollm2_with_dense_stops(smollm2: Tokenizer, text: str, stops: list[str], include: bool) -> None:
    check(smollm2, smollm2.encode(text), stops, include, skip=True)


@given(token_ids=st.lists(st.integers(0, 276), max_size=30), stops=STOPS, include=st.booleans(), skip=st.booleans())
def test_random_tokens_of_byte_fallback(
    spm: Tokenizer, token_ids: list[int], stops: list[str], include: bool, skip: bool
) -> None:
    check(spm, token_ids, stops, include, skip)


@given(text=st.text(max_size=40))
def test_no_delta_ever_holds_half_a_character(spm: Tokenizer, text: str) -> None:
    text = text.replace("\ufffd", "")
    stream = TextStream(spm)
    for token_id in spm.encode(text, add_special_tokens=False):
        assert "\ufffd" not in stream.push(token_id).text
    assert stream.flush() == ""


def test_incomplete_character_is_held_back_until_it_is_whole(smollm2: Tokenizer) -> None:
    token_ids = smollm2.encode("🙂")
    assert len(token_ids) > 1
    stream = TextStream(smollm2)
    assert [stream.push(token_id).text for token_id in token_ids] == [""] * (len(token_ids) - 1) + ["🙂"]


def test_incomplete_character_at_the_end_becomes_a_replacement(smollm2: Tokenizer) -> None:
    stream = TextStream(smollm2)
    for token_id in smollm2.encode("🙂")[:-1]:
        assert stream.push(token_id).text == ""
    assert stream.flush() == "\ufffd"


def test_only_what_could_become_a_stop_string_is_held_back(smollm2: Tokenizer) -> None:
    stream = TextStream(smollm2, ["END"])
    shown = [stream.push(smollm2.encode(piece)[0]).text for piece in ("x", "E", "N", "x")]
    assert shown == ["x", "", "", "ENx"]


def test_stop_string_inside_one_token_ends_there(smollm2: Tokenizer) -> None:
    token_id = smollm2.encode(" Paris")[0]
    assert smollm2.decode([token_id]) == " Paris"
    stream = TextStream(smollm2, ["ar"])
    delta = stream.push(token_id)
    assert (delta.text, delta.matched_stop) == (" P", "ar")


def test_stop_string_across_tokens_is_cut_out_or_kept(smollm2: Tokenizer) -> None:
    token_ids = smollm2.encode("one two three four")
    assert run(TextStream(smollm2, ["o thr"]), token_ids) == "one tw"
    assert run(TextStream(smollm2, ["o thr"], include_stop_str=True), token_ids) == "one two thr"


def test_nothing_follows_a_stop_string(smollm2: Tokenizer) -> None:
    stream = TextStream(smollm2, ["x"])
    token_id = smollm2.encode("x")[0]
    assert stream.push(token_id).matched_stop == "x"
    after = stream.push(smollm2.encode("more")[0])
    assert (after.text, after.matched_stop) == ("", "x")
    assert stream.flush() == ""


def test_stop_string_that_overlaps_itself_is_found(smollm2: Tokenizer) -> None:
    letters = {letter: smollm2.encode(letter)[0] for letter in "ab"}
    stream = TextStream(smollm2, ["aab"])
    assert run(stream, [letters[letter] for letter in "aaab"]) == "a"
    assert stream.matched_stop == "aab"


def test_special_token_is_no_text_unless_wanted(smollm2: Tokenizer) -> None:
    (token_id,) = smollm2.encode("<|im_end|>")
    assert token_id in smollm2.eos_token_ids
    assert run(TextStream(smollm2), [token_id]) == ""
    assert run(TextStream(smollm2, skip_special_tokens=False), [token_id]) == "<|im_end|>"


def test_cost_does_not_grow_with_the_text(smollm2: Tokenizer) -> None:
    token_ids = smollm2.encode("all work and no play makes a dull boy. " * 600)
    stream = TextStream(smollm2, ["never seen", "all work and no plays"])
    quarter = len(token_ids) // 4
    times = []
    for part in (token_ids[:quarter], token_ids[-quarter:]):
        started = time.process_time()
        for token_id in part:
            stream.push(token_id)
        times.append(time.process_time() - started)
    assert times[1] < 5 * times[0] + 0.01


def test_hostile_stop_string_costs_no_more_than_a_plain_one(tmp_path: Path, spm: Tokenizer) -> None:
    token_id = spm.encode("aa", add_special_tokens=False)[-1]
    stream = TextStream(spm, ["a" * 20_000 + "b"])
    started = time.process_time()
    for _ in range(20_000):
        stream.push(token_id)
    assert time.process_time() - started < 5


@given(
    text=st.text(alphabet="ab\n é🙂a", max_size=30),
    stops=STOPS,
    include=st.booleans(),
    min_tokens=st.integers(0, 12),
)
def test_stop_strings_count_only_behind_min_tokens(
    smollm2: Tokenizer, text: str, stops: list[str], include: bool, min_tokens: int
) -> None:
    """The first that is complete with a token beyond `min_tokens`; whatever is complete before is ordinary text."""
    token_ids = smollm2.encode(text)
    stream = TextStream(smollm2, stops, include_stop_str=include, min_tokens=min_tokens)
    early = len(smollm2.decode(token_ids[:min_tokens], is_continuation=True).rstrip("\ufffd"))
    expected, matched = text, None
    for end in range(early + 1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            matched = max(ended, key=len)
            expected = text[: end if include else end - len(matched)]
            break
    assert run(stream, token_ids) == expected
    assert stream.matched_stop == matched


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_stop_string_that_spells_a_control_token_matches_it(smollm2: Tokenizer, skip: bool, include: bool) -> None:
    token_ids = smollm2.encode("well<|im_start|>then", add_special_tokens=False)
    assert len(token_ids) == 3
    stream = TextStream(smollm2, ["<|im_start|>", "zzz"], include_stop_str=include, skip_special_tokens=skip)
    assert run(stream, token_ids) == "well" + ("<|im_start|>" if include else "")
    assert stream.matched_stop == "<|im_start|>"


def test_control_token_as_stop_string_waits_for_min_tokens(smollm2: Tokenizer) -> None:
    token_ids = smollm2.encode("a<|im_start|>b<|im_start|>c", add_special_tokens=False)
    stream = TextStream(smollm2, ["<|im_start|>"], min_tokens=2)
    assert run(stream, token_ids) == "ab"
    assert stream.matched_stop == "<|im_start|>"


def test_half_a_stop_string_before_a_control_token_is_given_out(smollm2: Tokenizer) -> None:
    token_ids = smollm2.encode("we<|im_start|>", add_special_tokens=False)
    stream = TextStream(smollm2, ["west", "<|im_start|>"])
    assert run(stream, token_ids) == "we"
