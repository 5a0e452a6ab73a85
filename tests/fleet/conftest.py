"""Two machines with an engine each, made once."""

import logging
import time
from collections.abc import Iterator

import pytest

from tests.e2e.faults.engine import absent
from tests.fleet.networks import Network, open_network

logger = logging.getLogger(__name__)


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    if why := absent():
        pytest.skip(why)
    began = time.monotonic()
    with open_network() as found:
        logger.info("two engines with their images after %.1f s", time.monotonic() - began)
        yield found


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"
