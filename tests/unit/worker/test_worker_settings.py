"""Worker settings that must fit each other are refused before anything starts, by the names of both."""

import pytest

from decode_service.settings import DecodeSettings
from prefill_service.settings import PrefillSettings


@pytest.mark.parametrize("settings", [DecodeSettings, PrefillSettings])
@pytest.mark.parametrize("flags", [["--max-num-seqs", "513"], ["--max-num-batched-tokens", "63"]])
def test_more_sequences_than_tokens_in_a_step_are_refused(
    settings: type[DecodeSettings] | type[PrefillSettings], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        settings.parse(flags, "worker")
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert all(word in message for word in ("max_num_seqs", "max_num_batched_tokens", flags[1]))
