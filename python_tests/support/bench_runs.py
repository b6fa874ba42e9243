"""Saved runs of ``benchmarks paper`` with random numbers, and their raw JSON lines."""

import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

TASKS = ("mt_bench", "translation", "summarization", "qa", "math", "rag")
METHODS: list[dict[str, Any]] = [
    {"name": "plain-eager", "label": "plain, eager", "kind": "plain", "levels": ["target"]},
    {"name": "plain", "label": "plain, static cache", "kind": "plain", "levels": ["target"],
     "baseline": True},
    {"name": "hf", "label": "transformers generate", "kind": "generate", "levels": ["target"]},
    {"name": "two", "label": "target <- eagle", "kind": "chain", "levels": ["target", "eagle"],
     "windows": [5]},
    {"name": "eagle-2", "label": "EAGLE-2", "kind": "eagle", "levels": ["target", "eagle"],
     "tree": {"depth": 6, "tokens": 60}},
    {"name": "three", "label": "target <- W4 <- eagle", "kind": "chain",
     "levels": ["target", "target W4", "eagle"], "windows": [11, 4],
     "tree": {"depth": 6, "tokens": 60}},
    {"name": "online", "label": "target <- eagle, online", "kind": "adaptive",
     "levels": ["target", "eagle"], "policy": "online"},
    {"name": "slow", "label": "a method | that <loses>", "kind": "chain",
     "levels": ["target", "drafter"], "windows": [3]},
]  # fmt: skip
SPEED = {
    "plain-eager": 0.7, "plain": 1.0, "hf": 0.6, "two": 1.5, "eagle-2": 2.2, "three": 2.9,
    "online": 1.7, "slow": 0.8,
}  # fmt: skip


def method(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"windows": None, "tree": None, "policy": None, "baseline": False, **given}


def facts(temperature: float = 0.0, place: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "command": "bench paper",
        "created": "2026-11-22T01:02:03",
        "machine": {"device_name": "a processor", "cpu": "a processor", "cores": 2, "threads": 2},
        "commit": "0123456789ab",
        "versions": {"torch": "2.13"},
        "settings": {"questions": "spec_bench", "turns": 14, "max_new_tokens": 64,
                     "temperature": temperature, "seed": 0, "template": None, "threads": 2,
                     "warm_up": 1},
        "models": [
            {"name": "target", "place": place, "parameters": 7_000_000, "dtype": "float32"},
            {"name": "target W4", "place": None, "parameters": 7_000_000, "dtype": "float32"},
            {"name": "eagle", "place": None, "parameters": 400_000, "dtype": "float32"},
        ],
        "methods": [method(one) for one in METHODS],
        "prediction": {"three": {"tokens_per_second": 123.0, "windows": [11, 4]}},
        "copy_bandwidth_bytes_per_second": 2e10,
        "weight_bytes": {"target": 1.4e7, "target W4": 4e6, "eagle": 1e6},
        **more,
    }  # fmt: skip


def turn_of(one, question, turn, draw, temperature) -> dict[str, Any]:
    """A line of turns.jsonl."""
    task = TASKS[question % len(TASKS)]
    tokens = [draw.randrange(50) for _ in range(draw.randint(8, 30))]
    decode = len(tokens) * 0.02 / SPEED[one["name"]] * draw.uniform(0.8, 1.25)
    prefill = draw.uniform(0.01, 0.05)
    own = one["kind"] not in ("generate", "assisted")
    levels = []
    for place, name in enumerate(one["levels"] if own else ()):
        last = place == len(one["levels"]) - 1
        accepted = [] if last and place else [
            draw.randint(1, 7 if len(one["levels"]) > 1 else 1) for _ in range(draw.randint(2, 6))
        ]  # fmt: skip
        levels.append(
            {"name": name, "passes": len(accepted) or draw.randint(5, 20),
             "seconds": decode * draw.uniform(0.1, 0.3), "accepted": accepted}
        )  # fmt: skip
    lossless: dict[str, Any] | None = None
    if turn == 0 and temperature == 0:
        lossless = {"identical": True, "at": None, "gap": None}
        if draw.random() < 0.2:
            gap = draw.choice([2e-5, 0.3])
            lossless = {"identical": False, "at": 4, "gap": gap}
    elif temperature > 0:
        lossless = {"surprise": draw.gauss(0, 3), "variance": draw.uniform(8, 10)}
    return {
        "question_id": question + 80, "category": task, "task": task, "turn": turn,
        "method": one["name"], "status": "ok", "error": None,
        "prompt_tokens": draw.randint(20, 200), "new_tokens": len(tokens),
        "seconds": prefill + decode, "prefill_seconds": prefill if own else None,
        "levels": levels, "tokens": tokens, "lossless": lossless,
    }  # fmt: skip


def failed(line: Mapping[str, Any], error: str) -> dict[str, Any]:
    nothing = dict.fromkeys(
        ("prompt_tokens", "new_tokens", "seconds", "prefill_seconds", "tokens", "lossless")
    )
    return {**line, **nothing, "levels": [], "status": "failed", "error": error}


def lines(about: Mapping[str, Any], seed: int = 0, questions: int = 12) -> list[dict[str, Any]]:
    """Turns of every method; every sixth question has two, some fail."""
    draw = random.Random(seed)
    found = []
    for question, one in itertools.product(range(questions), about["methods"]):
        broken = False
        for turn in range(2 if question % 6 == 0 else 1):
            line = turn_of(one, question, turn, draw, about["settings"]["temperature"])
            if broken:
                line = failed(line, "the turn before failed")
            elif draw.random() < 0.06:
                line, broken = failed(line, "RuntimeError: out of memory"), True
            found.append(line)
    return found


def save(folder: Path, about: Mapping[str, Any], turns: Iterable[Mapping[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "turns.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    return folder


def read(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "turns.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def ok(turns: Sequence[Mapping[str, Any]], name: str, task: str = "overall") -> dict[Any, Any]:
    """Return the records of a method and task, by question and turn."""
    return {
        (line["question_id"], line["turn"]): line
        for line in turns
        if line["method"] == name
        and line["status"] == "ok"
        and (task == "overall" or line["task"] == task)
    }
