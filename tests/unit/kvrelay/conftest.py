"""A fake gateway for clients and commands."""

from collections.abc import Iterator

import pytest

from tests.unit.kvrelay.fake_gateway import FakeGateway, serving


@pytest.fixture
def gateway() -> FakeGateway:
    return FakeGateway()


@pytest.fixture
def target(gateway: FakeGateway) -> Iterator[str]:
    with serving(gateway) as address:
        yield address
