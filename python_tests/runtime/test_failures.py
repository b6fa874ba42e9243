"""An error says where it was, and the next call is as if nothing had happened."""

import contextlib
import gc
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import captured_chains
import pytest
import torch
import toy
from failing import PROMPTS, SAMPLING, Failing, model
from resident import resident_bytes

import polyspec_ext as ps
from polyspec_ext.levels import HuggingFaceLevel, PromptBatch

PACKAGE = str(Path(ps.__file__).parent)


class Growing(HuggingFaceLevel):
    """A level that does not know the final length of its rows, so that its cache grows."""

    def prefill(self, prompts: PromptBatch) -> Any:
        return super().prefill(prompts._replace(capacity=0))


class Setting:
    """A chain of three small models with caches that grow in steps of 4 tokens, and its good
    result.

    Args:
        shared: the middle uses the target's cache.
        options: of all levels.
    """

    def __init__(self, prompts: list[list[int]], shared: bool = False, **options: Any) -> None:
        self.levels: list[Growing] = []
        for seed, (name, layers) in enumerate((("target", 3), ("middle", 2), ("drafter", 1))):
            own = dict(options, step=4)
            if shared and name == "middle":
                own = {"shares_cache_with": self.levels[0]}
            self.levels.append(Growing(model(seed, layers), name=name, **own))
        self.chain = ps.Chain(self.levels, [4, 2])
        self.prompts = prompts
        self.good = self.generate()

    def generate(self) -> ps.Output:
        return self.chain.generate(self.prompts, 14, **SAMPLING)

    def is_unharmed(self) -> None:
        again = self.generate()
        assert again.sequences.equal(self.good.sequences)
        assert again.logprobs == self.good.logprobs


@pytest.fixture(params=["alone", "batch", "batch, shared cache"])
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(PROMPTS[: 1 if request.param == "alone" else 4], "shared" in request.param)


def notes(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", []))


# ---- levels that fail ----------------------------------------------------------------------------


@pytest.mark.parametrize("faulty", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "at"),
    [
        *(("forward", at) for at in (1, 2, 5)),
        *((n, 1) for n in ("prefill", "rollback", "select", "_make")),
    ],
)
def test_an_exception_in_a_level(faulty: int, name: str, at: int) -> None:
    """In its last layer, after the layers before have appended to their caches; or outside."""
    setting = Setting(PROMPTS, shared=name == "forward")
    limits = [14, 3, 3, 3]  # rows leave early, so that the caches shrink
    good = setting.chain.generate(PROMPTS, limits, **SAMPLING).sequences
    level = setting.levels[faulty]
    setting.chain.generate(PROMPTS[0], 9, **SAMPLING)  # so that the batch needs another cache
    holder: Any = level.model.model.layers[-1] if name == "forward" else level
    right = getattr(holder, name)
    error = KeyboardInterrupt("no room") if at == 2 else MemoryError("no room")
    setattr(holder, name, Failing(right, at, error))
    with pytest.raises(type(error), match="no room") as caught:
        setting.chain.generate(PROMPTS, limits, **SAMPLING)
    setattr(holder, name, right)
    if at != 2:
        assert f"in level {faulty + 1} ({level.name})" in notes(caught.value)
        assert "request 0 at position " in notes(caught.value)
    assert setting.chain.generate(PROMPTS, limits, **SAMPLING).sequences.equal(good)
    setting.is_unharmed()


# The last pass of each level that runs as it is, and one of the step that is captured first (the
# drafter's second).
PASSES = {0: (2, 3), 1: (3, 4), 2: (5, 7)}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("tried to allocate"), ValueError("no")])
@pytest.mark.parametrize("captured", [False, True], ids=["before", "captured"])
@pytest.mark.parametrize("faulty", [0, 1, 2])
def test_an_exception_before_or_while_a_graph_is_captured(faulty, captured, error) -> None:
    """A replay runs no Python, which could fail."""
    wanted = (
        captured_chains.make([4, 2], captured=False)[0].generate(PROMPTS, 32, **SAMPLING).sequences
    )
    chain, graphs = captured_chains.make([4, 2], captured=True)
    drafter: Any = chain.drafter
    level: Any = [*chain.levels, drafter.level][faulty]
    inner = level.model.model.layers[-1]
    forward = inner.forward
    inner.forward = Failing(forward, PASSES[faulty][captured], error)
    if captured and isinstance(error, RuntimeError):  # the step is run as it is, then tried again
        assert chain.generate(PROMPTS, 32, **SAMPLING).sequences.equal(wanted)
    else:
        with pytest.raises(type(error), match=str(error)) as caught:
            chain.generate(PROMPTS, 32, **SAMPLING)
        assert f"in level {faulty + 1} (level {faulty})" in notes(caught.value)
    inner.forward = forward
    for _ in range(2):  # the second replays the capture of the first
        assert chain.generate(PROMPTS, 32, **SAMPLING).sequences.equal(wanted)
    assert graphs.num_replays > 0


@pytest.mark.parametrize("faulty", [0, 1])
def test_nans_inside_a_model_do_not_stay_in_its_cache(setting: Setting, faulty: int) -> None:
    """They would reach other rows and later calls as 0 * NaN, from slots that the mask hides."""
    layer = setting.levels[faulty].model.model.layers[0]
    forward, calls = layer.forward, iter(range(1, 1000))

    def nan(*args: Any, **options: Any) -> Any:
        out = forward(*args, **options)
        return out * math.nan if next(calls) == 4 else out

    layer.forward = nan
    with pytest.raises(ps.RequestError) as caught:
        setting.generate()
    layer.forward = forward
    assert caught.value.level == faulty + 1
    setting.is_unharmed()


# ---- interrupts ----------------------------------------------------------------------------------


class Interrupt:
    """Raises KeyboardInterrupt at the first run of a bytecode of this package.

    Args:
        at: code and offset of the bytecode; None: interrupts nothing. Only frames of that code are
            traced by bytecode, because traced calls are slow.

    Attributes:
        seen: the bytecodes that were run, where `at` is None.
    """

    def __init__(self, at: tuple[Any, int] | None = None) -> None:
        self.at, self.seen = at, dict[tuple[Any, int], None]()

    def __enter__(self) -> Any:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        if code is not self.at[0] if self.at else not code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: Any, event: str, _: Any) -> Any:
        if event == "opcode":
            place = frame.f_code, frame.f_lasti
            self.seen[place] = None
            if place == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._step


# Two calls in turn, which write other parameters, rows and lengths over each other's.
SHORT: dict[str, Any] = {"max_new_tokens": 5, "temperature": 0.05, "seed": 3, "eos_token_id": []}
LONG = {**SHORT, "max_new_tokens": 6, "temperature": 1.5, "top_k": 4, "seed": 7}
FIRST, SECOND = PROMPTS[:2], PROMPTS[1:]


def small(**options: Any) -> ps.Chain:
    levels = [HuggingFaceLevel(model(seed, 1), step=4, **options) for seed in range(2)]
    return ps.Chain(levels, [2])


def sharing() -> ps.Chain:
    target = HuggingFaceLevel(model(0, 1), step=4)
    return ps.Chain([target, HuggingFaceLevel(model(1, 1), shares_cache_with=target)], [2])


def streaming() -> ps.Chain:
    drafter = HuggingFaceLevel(model(1, 1), streaming={"window": 4, "sinks": 2, "slack": 4})
    return ps.Chain([HuggingFaceLevel(model(0, 1), step=4), drafter], [2])


def blind() -> ps.Chain:
    levels = [HuggingFaceLevel(model(seed, 1), step=4) for seed in range(2)]
    return ps.Chain(levels, [2], sync_each_step=False)


def toys() -> ps.Chain:
    return ps.Chain(toy.make_levels(3, 5, 2.0), [3, 2])


# Of each kind of chain every n-th bytecode, and more of memory that calls share: where an interrupt
# at any of k bytecodes in a row would do harm, it is seen with probability k / n or more.
INTERRUPTED = {toys: 8, small: 320, sharing: 960, streaming: 960, blind: 960}
SHARED = ("tensors.py", "lengths.py", "rollback.py", "layers.py", "rows.py")


@pytest.mark.parametrize("make", INTERRUPTED, ids=lambda make: make.__name__)
@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ctrl_c_at_a_bytecode(make: Callable[[], ps.Chain], cold: bool) -> None:
    """Record the state that a call keeps for the next. `cold`: in a first call."""
    first, second = ([[1, 2]], [[2, 1, 0]]) if make is toys else (FIRST, SECOND)

    def texts(chain: ps.Chain) -> list[Any]:
        outputs = [chain.generate(second, **LONG), chain.generate(first, **SHORT)]
        return [(out.sequences.tolist(), out.logprobs) for out in outputs]

    def prepared() -> ps.Chain:
        made = make()
        if not cold:
            made.generate(first, **SHORT)
        return made

    wanted, chain = texts(make()), prepared()
    with Interrupt() as whole:
        chain.generate(second, **LONG)
    assert len(whole.seen) > 4000
    step = INTERRUPTED[make] * (1 + cold)
    chain = prepared()
    for number, at in enumerate(whole.seen):
        if number % (step // 8 if at[0].co_filename.endswith(SHARED) else step):
            continue
        if cold:
            chain = prepared()
        # (The code after a call's last bytecode depends on the state that the chain has kept.)
        with contextlib.suppress(KeyboardInterrupt), Interrupt(at):
            chain.generate(second, **LONG)
        assert texts(chain) == wanted, at


def test_a_stream_that_is_interrupted_loses_no_text() -> None:
    """But for the token on its way to the caller."""
    chain = toys()
    wanted = list(chain.stream([1, 2], **LONG))
    with Interrupt() as whole:
        list(chain.stream([1, 2], **LONG))
    files = ("outputs.py", "batch.py")
    ats = [at for at in whole.seen if at[0].co_filename.endswith(files)]
    assert len(ats) > 300
    for at in ats:
        stream, given = None, []
        try:
            with Interrupt(at):
                stream = chain.stream([1, 2], **LONG)
                for token in stream:
                    given.append(token)
        except KeyboardInterrupt:
            if stream is not None:
                with contextlib.suppress(RuntimeError):  # the batch has failed
                    given += stream
        if stream is None:
            continue
        text = stream.batch.rows[0].tokens[2:]
        assert text == wanted[: len(text)]
        lost = [n for n in range(len(text)) if given[:n] != text[:n]]
        assert given == text or given in [text[:n] + text[n + 1 :] for n in range(len(text))], lost


def test_a_first_pass_that_fails_leaves_no_cache_behind() -> None:
    """The keys may have another data type than any later pass's."""
    models = [model(seed, 1) for seed in range(2)]
    wanted = ps.Chain(models, [2]).generate(PROMPTS, 6, **SAMPLING).sequences
    for faulty in range(2):
        chain = ps.Chain(models, [2])
        values = models[faulty].model.layers[0].self_attn.v_proj
        hook = values.register_forward_hook(lambda *given: given[-1].bfloat16())
        with pytest.raises(RuntimeError):
            chain.generate(PROMPTS, 6, **SAMPLING)
        hook.remove()
        for _ in range(2):
            assert chain.generate(PROMPTS, 6, **SAMPLING).sequences.equal(wanted)


def test_an_observer_or_a_stream_that_fails() -> None:
    setting = Setting(PROMPTS)

    def observe(number: int, logits: torch.Tensor) -> None:
        raise ZeroDivisionError

    batch = setting.chain.batch(PROMPTS, 14, **SAMPLING, observe=observe)
    with pytest.raises(ZeroDivisionError):
        batch.advance()
    with pytest.raises(RuntimeError, match="or it failed"):
        batch.advance()
    setting.is_unharmed()
    stream = setting.chain.stream(PROMPTS[0], 14, **SAMPLING)
    next(stream)  # and drop the rest
    setting.is_unharmed()


# ---- leaks ---------------------------------------------------------------------------------------


def living() -> tuple[int, int]:
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in objects)
    return tensors, len(objects)


def calls(chain: ps.Chain, levels: list[HuggingFaceLevel], count: int) -> Iterator[str]:
    layer = levels[0].model.model.layers[0]
    forward = layer.forward

    def nan(*args: Any, **options: Any) -> Any:
        return forward(*args, **options) * math.nan

    for i in range(count):
        prompts = PROMPTS[0] if i % 3 else PROMPTS[:2]
        kind = i % 10
        if kind == 2:
            layer.forward = Failing(forward, 1 + i % 4, RuntimeError("fails"))
        elif kind == 4:
            layer.forward = Failing(forward, 1 + i % 4, KeyboardInterrupt())
        elif kind == 6:
            layer.forward = nan
        try:
            if kind == 8:
                next(chain.stream(PROMPTS[1], 4, **SAMPLING))
            else:
                chain.generate(prompts, 3, temperature=float(i % 2), seed=i, eos_token_id=[])
            yield "good"
        except (RuntimeError, KeyboardInterrupt) as error:
            yield type(error).__name__
        finally:
            layer.forward = forward


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("alone", [False, True], ids=["step by step", "at once"])
def test_hundreds_of_calls_leave_nothing_behind(alone: bool) -> None:
    levels = [HuggingFaceLevel(model(seed, 1), name=f"level {seed}") for seed in range(2)]
    chain = ps.Chain(levels, [2], sync_each_step=not alone)
    list(calls(chain, levels, 60))
    # The kept state depends on the rows that left in the last call: the same call before each
    # count.
    chain.generate(PROMPTS[0], 3, eos_token_id=[])
    before, memory = living(), resident_bytes()
    seen = list(calls(chain, levels, 300))
    chain.generate(PROMPTS[0], 3, eos_token_id=[])
    after = living()
    assert {kind: seen.count(kind) for kind in sorted(set(seen))} == {
        "KeyboardInterrupt": 30, "RequestError": 30, "RuntimeError": 30, "good": 210
    }  # fmt: skip
    assert after[0] == before[0]
    assert after[1] - before[1] < 60
    assert resident_bytes() - memory < 8 << 20
