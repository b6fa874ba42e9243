"""Requests keep the promises of vLLM: texts, seeds, rules, log-probabilities, any company."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm_engines as engines

METHODS = ("ngram", "drafts", "two levels", "three levels")
CHAINS = METHODS[2:]
GREEDY = (*METHODS, "policy")  # windows follow times, as seeded texts do with them
PROMPTS = [[(7 * i + j * j) % engines.V for j in range(3 + 3 * i)] for i in range(8)]
LONG = [(3 * j + j * j) % engines.V for j in range(50)]
RULES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"allowed_token_ids": [1, 2, 3, 5, 8, 13]},
    {"logit_bias": {4: 5.0, 7: -100.0}},
    {"min_tokens": 9, "stop_token_ids": [1, 2, 3]},
    {"stop_token_ids": [5, 6]},
    {"repetition_penalty": 1.2, "logit_bias": {4: 3.0}},
    {},
)
# Fewer tokens in a step than the requests' windows and prompts, and fewer blocks than their texts.
TIGHT = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
    "block_size": 32,
    "num_gpu_blocks_override": 7,
}


def parameters(**options: Any) -> Any:
    import vllm

    return vllm.SamplingParams(
        **{"max_tokens": 16, "temperature": 0.0, "detokenize": False, **options}
    )


def seeded(most: int | None) -> list[Any]:
    return [
        parameters(temperature=0.9, top_p=0.95, seed=seed, max_tokens=most) for seed in range(8)
    ]


def answers(engine: Any, ours: bool) -> dict[str, Any]:
    """Return texts of all kinds of requests; `ours`: also of requests that end vLLM's engine."""

    def together_and_alone(most: int | None) -> list[list[list[int]]]:
        pairs = zip(PROMPTS, seeded(most), strict=True)
        alone = [engines.texts(engine, [prompt], one)[0] for prompt, one in pairs]
        return [engines.texts(engine, PROMPTS, seeded(most)), alone]

    given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    plain = engine.generate(given, parameters(logprobs=3), use_tqdm=False)
    logprobs = [
        [{i: one.logprob for i, one in token.items()} for token in output.outputs[0].logprobs]
        for output in plain
    ]
    return {
        "greedy": engines.texts(engine, PROMPTS, parameters(max_tokens=40)),
        "rules": engines.texts(engine, PROMPTS, [parameters(**rules) for rules in RULES]),
        "logprobs": logprobs,
        "end": engines.texts(engine, [LONG, *PROMPTS], parameters(max_tokens=None)),
        "seeded": together_and_alone(36),
        "seeded to the end": together_and_alone(None),
        "joined": joined(engine, seeded(36)),
        "two": engines.texts(engine, [PROMPTS[0]], parameters(temperature=1.0, n=2, seed=3)),
        "counters": engines.counters(engine),
        "beside": beside(engine) if ours else None,
    }


def joined(engine: Any, given: list[Any]) -> list[list[int]]:
    """Return texts of requests that join one after another; the first is aborted."""
    core = engine.llm_engine
    texts: dict[str, list[int]] = {}

    def step() -> None:
        for output in core.step():
            if output.finished:
                texts[output.request_id] = list(output.outputs[0].token_ids)

    for i, (prompt, parameters) in enumerate(zip(PROMPTS, given, strict=True)):
        core.add_request(str(i), {"prompt_token_ids": prompt}, parameters)
        step()
    core.abort_request(["0"])
    while core.has_unfinished_requests():
        step()
    return [texts[str(i)] for i in range(1, len(given))]


Answers = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def answers_of(models: Path) -> Answers:
    """Return the answers of engines, each asked once."""
    known: dict[tuple[str, bool], dict[str, Any]] = {}

    def ask(method: str, tight: bool = False) -> dict[str, Any]:
        if (method, tight) not in known:
            config = engines.configuration(models, method)
            if method == "none":
                del config["additional_config"]
            size = TIGHT if tight else {}
            known[method, tight] = engines.run(answers, method != "none", **config, **size)
        return known[method, tight]

    return ask


@pytest.mark.parametrize("method", GREEDY)
def test_greedy_texts_are_those_of_plain_vllm(answers_of: Answers, method: str) -> None:
    plain, ours = answers_of("none"), answers_of(method)
    for name in ("greedy", "rules", "end"):
        assert ours[name] == plain[name], name
    assert ours["counters"]["vllm:spec_decode_num_accepted_tokens"] > 0


@pytest.mark.parametrize("method", METHODS)
def test_log_probabilities_are_those_of_plain_vllm(answers_of: Answers, method: str) -> None:
    plain, ours = answers_of("none")["logprobs"], answers_of(method)["logprobs"]
    assert [[list(token) for token in text] for text in ours] == [
        [list(token) for token in text] for text in plain
    ]
    for a, b in zip(ours, plain, strict=True):
        for one, other in zip(a, b, strict=True):
            assert list(one.values()) == pytest.approx(list(other.values()), abs=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_gives_the_same_text_in_any_batch(answers_of: Answers, method: str) -> None:
    ours = answers_of(method)
    together, alone = ours["seeded"]
    assert together == alone
    assert ours["joined"] == alone[1:]
    assert len(set(map(tuple, ours["two"]))) == 2


@pytest.mark.parametrize("method", GREEDY)
def test_cut_windows_prefills_and_preemption_change_no_greedy_text(
    answers_of: Answers, method: str
) -> None:
    plain, ours = answers_of("none"), answers_of(method, tight=True)
    for name in ("greedy", "rules", "end"):
        assert ours[name] == plain[name], name
    assert ours["counters"]["vllm:num_preemptions"] > 0


@pytest.mark.parametrize("method", CHAINS)
def test_cut_windows_and_preemption_change_no_text_of_a_seed(
    answers_of: Answers, method: str
) -> None:
    """The drafts of a chain stay until they are verified."""
    ours, tight = answers_of(method), answers_of(method, tight=True)
    for name in ("seeded", "seeded to the end"):
        assert tight[name] == ours[name]
        assert ours[name][0] == ours[name][1]


def on_ranks(engine: Any) -> tuple[list[list[int]], list[list[int]], list[list[Any]]]:
    """Return greedy and seeded texts, and the tokens that each rank has drawn, step by step."""

    def record(worker: Any) -> None:
        runner = worker.model_runner
        runner.drawn, sample = [], runner._sample

        def recorded(logits: Any, metadata: Any) -> Any:
            output = sample(logits, metadata)
            runner.drawn.append(output.sampled_token_ids.tolist())
            return output

        runner._sample = recorded

    engine.collective_rpc(record)
    greedy = engines.texts(engine, PROMPTS, parameters(max_tokens=40))
    texts = engines.texts(engine, PROMPTS, seeded(36))
    return greedy, texts, engine.collective_rpc(lambda worker: worker.model_runner.drawn)


@pytest.mark.slow
def test_two_ranks_draw_the_texts_of_one(answers_of: Answers, models: Path) -> None:
    if "polyspec" not in importlib.metadata.entry_points(group="vllm.general_plugins").names:
        pytest.skip("the package's entry points are not on the path")
    config = engines.configuration(models, "three levels")
    greedy, texts, ranks = engines.run(
        on_ranks, tensor_parallel_size=2, distributed_executor_backend="mp", **config
    )
    one = answers_of("three levels")
    assert greedy == one["greedy"]
    assert texts == one["seeded"][0]
    assert ranks[0] == ranks[1]
    assert max(len(row) for step in ranks[0] for row in step) > 1


@pytest.mark.parametrize("method", ["drafts", "two levels"])
def test_a_request_without_a_distribution_ends_no_other(answers_of: Answers, method: str) -> None:
    together, alone = answers_of(method)["beside"]
    assert together[0] == [0, 0, 0, 5]
    assert together[1:] == alone
    assert len({token for text in alone for token in text}) > 1


def beside(engine: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Return texts of a request that may emit nothing in three steps, where its likeliest id is 0,
    and of others, in a batch; and of the others alone."""
    wrong = {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 3}
    others = [[3, 1, 4], [1, 5, 2, 6]]
    free = parameters(temperature=0.9, seed=3, max_tokens=6)
    rules = [parameters(max_tokens=6, **wrong), free, free]
    together = engines.texts(engine, [[9, 4, 2], *others], rules)
    return together, engines.texts(engine, others, free)
