"""The gateway's settings: defaults and names."""

import pytest

from gateway.settings import GatewaySettings
from kvrelay.serving.settings import parse_settings


def test_defaults_serve_the_built_in_model() -> None:
    settings = parse_settings(GatewaySettings, [], "gateway")
    assert (settings.model, settings.port, settings.max_attempts) == ("smollm2", 50051, 3)
    assert settings.local_prefill_max_tokens == 16


def test_flag_goes_before_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_MAX_QUEUED_REQUESTS", "7")
    monkeypatch.setenv("KVRELAY_PORT", "1234")
    settings = parse_settings(GatewaySettings, ["--port", "0"], "gateway")
    assert (settings.max_queued_requests, settings.port) == (7, 0)


@pytest.mark.parametrize(
    ("flag", "value"), [("--max-attempts", "0"), ("--queue-timeout-s", "nan"), ("--keep-alive-interval-s", "0")]
)
def test_value_out_of_range_stops_the_start(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(GatewaySettings, [flag, value], "gateway")
    assert flag in capsys.readouterr().err


def test_every_setting_is_described() -> None:
    assert all(field.description for field in GatewaySettings.model_fields.values())
