"""The endpoint's chains, and an endpoint for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

import polyspec_ext as ps
from polyspec_ext import tiny

if TYPE_CHECKING:
    import endpoint


@pytest.fixture(scope="session")
def chains() -> tuple[ps.Chain, ps.Chain]:
    """A chain to serve, and one for comparison; packed, so that no logit depends on rows."""
    return tiny.chain(pack=True), tiny.chain(pack=True)


@pytest.fixture(scope="session")
def served(chains: tuple[ps.Chain, ps.Chain]) -> Iterator[endpoint.Served]:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    import endpoint

    with endpoint.Served(*chains, slots=4, max_waiting=64) as one:
        yield one


@pytest.fixture
def client(served: endpoint.Served) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as one:
        yield one
