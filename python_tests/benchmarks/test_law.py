"""The law of a tiny model: engines have it, and planted faults are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import law

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    law.save_models(folder)
    return folder


@pytest.fixture(scope="module")
def laws(models: Path) -> dict[str, torch.Tensor]:
    return {name: law.law_of(models, *setting) for name, setting in law.SETTINGS.items()}


def row_of(label: str, models: Path, laws: dict[str, torch.Tensor]) -> dict[str, Any]:
    count = 1024 if label.startswith("ours") else 2000
    texts = law.answers(label, str(models), count, 1)
    return law.judged(texts, laws, law.ours(models)(law.greedy()).texts, True)


@pytest.mark.parametrize("label", ["ours: three levels", "ours: three paths", *law.FAULTS])
def test_the_faults_are_found_and_no_other(
    label: str, models: Path, laws: dict[str, torch.Tensor]
) -> None:
    row = row_of(label, models, laws)
    assert law.is_exact(row) == (not law.FAULTS.get(label)), row
    assert law.status({"engines": {label: row}}) == 0
    assert law.status({"engines": {label: {"error": "fails"}}}) == 1


def test_laws_of_other_temperatures_and_filters_are_others(
    models: Path, laws: dict[str, torch.Tensor]
) -> None:
    texts = law.answers("ours: two levels", str(models), 1024, 1)["texts"]
    for name, (temperature, filters) in law.SETTINGS.items():
        assert law.p_value(laws[name], texts[name]) > law.LIMIT
        other = law.law_of(models, temperature + 0.5, filters)
        assert law.p_value(other, texts[name]) < law.LIMIT
