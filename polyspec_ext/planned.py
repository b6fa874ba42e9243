"""`plan`: which chain of the models at hand decodes one's prompts fastest on this machine; and
`Chain`, which asks it for `Chain.planned`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from . import arguments
from .chain import Chain as Chain
from .chain import plan_with
from .inputs import Prompt
from .planning.parts import Request
from .planning.planner import Plan, load_or_plan
from .planning.planner import plan as _plan
from .planning.trials import TRIED
from .seeds import fresh_seed
from .tuning import Switch


def plan(
    levels: Sequence[Any],
    prompts: Prompt,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = 0,
    eos_token_id: int | Sequence[int] | None = None,
    *,
    batch: int = 1,
    pack: Switch = "auto",
    compile: Switch = False,
    seconds: float = 40.0,
    verify: bool = False,
    theorem: bool = False,
    repeats: int = 3,
    trials: int | None = TRIED,
    consider: bool = False,
) -> Plan:
    """Measure, on these prompts and this machine, what a chain of some of `levels` would cost and
    gain, and recommend one, or none.

    Measured are the seconds of every level's prefills and of its steps by their number of tokens,
    in chains at work, the chain's own time, and how likely each level accepts what each other
    proposes along the target's texts; the renewal model (`planning.theory`) then predicts every
    chain, with the windows, rounds and tail that suit it best. The fastest by that are then run for
    a moment, beside the target alone, and what their steps take there is what predictions go by.
    Rates are of whole calls, so that a level whose prefill costs more than it gains in
    `max_new_tokens` is left out; those of decoding alone stand beside them. Where the request
    samples, the rule is chosen by running both.

    Args:
        levels: as `Chain` takes them, but with as many candidates between target and drafter as one
            likes, and several drafters without a model behind them. The target is the first; the
            others are put in order by their times.
        prompts: token ids, such as will be asked; what is measured is an average over them.
        max_new_tokens ... eos_token_id: of the requests to come. Calls that are measured have seeds
            of their own, from `seed` on; None: from one out of torch's generator.
        batch: prompts of one call, whose rows share every step and wait for each other; `prompts`
            are taken so many at a time.
        pack, compile: as `Chain` has them.
        seconds: that measuring may take; the search takes a few more.
        verify: also run the recommendation, the runners-up and the target alone, and recommend
            the fastest.
        theorem: also run the chains that Theorem 3.2 compares, and try all of them.
        repeats: of these runs.
        trials: how many of the fastest chains are run for a moment before anything is recommended;
            None: all, so that every prediction goes by the chain's own steps.
        consider: also what `levels` do not name: the target's 4-bit copy in its cache; of drafts
            given by their directories 4-bit copies, and drafts with a quarter of the ids where they
            have many; prompt lookup and suffixes. What cannot be made is left out. Making them may
            take a quarter of `seconds` beside; one that was begun is completed.

    Returns:
        The predictions, what they follow from, and the recommended chain.

    Raises:
        TypeError, ValueError: as `Chain` and `Chain.generate` have it.
    """
    for name, value in (("verify", verify), ("theorem", theorem), ("consider", consider)):
        arguments.flag(name, value)
    arguments.switch("pack", pack)
    arguments.switch("compile", compile)
    seconds = arguments.real("seconds", seconds, sys.float_info.max)
    repeats = arguments.integer("repeats", repeats, low=1)
    if trials is not None:
        trials = arguments.integer("trials", trials)
    seed = fresh_seed() if seed is None else seed
    request = Request(max_new_tokens, temperature, top_k, top_p, min_p, seed, eos_token_id, batch)
    return _plan(
        levels,
        prompts,
        request,
        pack=pack,
        compile=compile,
        limit=seconds,
        verify=verify,
        theorem=theorem,
        repeats=repeats,
        trials=trials,
        consider=consider,
    )


plan_with(load_or_plan)
