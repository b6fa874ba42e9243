"""The law of a tiny model: engines have it, and another law is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import law


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    law.save_models(folder)
    return folder


@pytest.mark.parametrize("label", ["ours: three levels", "ours: three paths"])
def test_a_chain_has_the_law_and_no_other(label: str, models: Path) -> None:
    told = law.answers(label, str(models), 1024, 1)
    for name, (temperature, filters) in law.SETTINGS.items():
        texts = told["texts"][name]
        assert law.p_value(law.law_of(models, temperature, filters), texts) > 1e-6
        assert law.p_value(law.law_of(models, temperature + 0.5, filters), texts) < 1e-6
    assert told["batch"] == told["alone"]
    assert told["greedy"] == law.ours(models)(law.greedy()).texts
