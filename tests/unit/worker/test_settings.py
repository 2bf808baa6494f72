"""What a worker refuses to be told."""

import pytest

from worker.settings import WorkerSettings


@pytest.mark.parametrize(("given", "taken"), [("gateway:1", "gateway:1"), ("http://gateway:1", "gateway:1")])
def test_gateway_is_an_address(given: str, taken: str) -> None:
    assert WorkerSettings.parse(["--gateway", given], "kvrelay decode").gateway == taken


@pytest.mark.parametrize("given", ["gateway", "https://gateway:1", "dns:///gateway", "gateway:99999"])
def test_gateway_that_is_no_address_is_named(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        WorkerSettings.parse(["--gateway", given], "kvrelay decode")
    assert capsys.readouterr().err.startswith(f"kvrelay decode: --gateway: {given!r} is not valid: ")
