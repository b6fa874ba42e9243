"""`Chain`: a target, the levels below it and a drafter, generating with the target's distribution.

The staged rule (Wang et al., ICML 2025, algorithm 1, in an exact form): level i < n waits for
window[i-1] tokens from below and verifies them, with the processed distribution of level i+1 as q
for each of them. `runtime.engine` implements it.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch

from . import arguments, inputs, rooms
from .arguments import Switch
from .drafters import (
    BatchedDrafter,
    Drafter,
    DraftModel,
    elements,
    is_drafter,
    levels_of,
    resolve,
)
from .inputs import Ends, Floats, Ints, Parameters, Prompt, Request, Tokenized
from .levels import BatchedLevel, EncodedInput, Level, Options, batched
from .levels.base import id_map_of, require_same_vocabulary
from .levels.models import level_line, num_parameters
from .levels.products import with_adapters, without_wrapper
from .outputs import Output, StoppedRow, Stream, TargetTokenizer, alternatives, complete
from .policies import WindowPolicy
from .runtime.batch import Batch, CacheOwner
from .runtime.engine import Engine, Observer
from .runtime.plan import ChainConfig, Operators, default_rounds
from .runtime.rows import Row
from .sampling import Alternatives, LogitsProcessors
from .tensors import padded

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .inputs import Rules

    Answer = rooms.chat.Answer
    Graphs = rooms.graphs.Graphs

_KEPT = 16384  # tokens in the prefix cache of `cache_prompt`
_STATES = 8  # texts in that cache of a level whose state cannot be truncated


class Prediction(NamedTuple):
    """Predicted tokens per second of `Chain.generate` for calls of `batch` prompts, and their
    relative uncertainty (`planning.planner.Candidate.uncertainty`)."""

    tokens_per_second: float
    uncertainty: float
    batch: int = 1


class Chain:
    """A polybasic chain of models.

    Several values may be a list, a tuple, a numpy array or a tensor; a number is Python's, numpy's
    or a tensor of no dimensions, and never a bool. Arguments are checked as by `ps.sample` and
    `ps.verify`, and errors begin with the argument's name.

    Args:
        levels: target first, drafter last, in a list or tuple. Hugging Face causal models, model
            ids or paths, or `Level` objects, none of them twice; the last may be a `Drafter`
            instead, or a word: "prompt-lookup", "suffix" or "ngram" for a `PromptLookup`,
            `SuffixMatch` or `NGramTable`, "early-exit:K" for the first K layers of the target
            (`early_exit`), "mtp" for the multi-token head of the target's checkpoint; or the
            directory of an EAGLE or DFlash head for the target ("eagle:" or "dflash:" before an id
            on the hub). A single element decodes plainly, which is the honest baseline.
        window: ``window[i]`` tokens are gathered for level i+1 before it verifies (``[mu, K]`` for
            three levels), each >= 0; 0 lets that level decode alone. Default: 4 at the bottom,
            doubled at every level above.
        rounds: ``rounds[i]`` bounds how often level i+1 waits: it verifies after as many blocks of
            level i+2, full window or not. For every level above the lowest that verifies (a single
            number for three levels); 0: no bound, as in the paper. Default: as many as fill the
            window if every token is accepted, ceil(window[i] / (window[i+1] + 1)). Bounded rounds
            keep the rows of a batch in step, and let a CUDA device do a round of the target
            without host synchronisation.
        tail: maximum number of tokens, from three levels on, that the drafter adds to the block
            that the target is about to verify; at most the drafter's window. The target verifies
            them against the drafter's distribution: they cost drafting, and no verification by the
            levels between. Not with a drafter of trees.
        rule: "token" (Leviathan et al. 2023) or "block" (Sun et al. 2024), on every level.
        dtype, device: for models loaded here. float32, bfloat16 or float16, as dtype or name, or
            "auto" for the data type of each checkpoint; the default is "auto", but on the CPU
            float32, except for bfloat16 checkpoints with packed weights on a processor with
            bfloat16 products (`levels.Options`). CPU or CUDA; default: the CPU.
        check_vocabulary: compare the tokenizers beside the models' weights.
        graphs: capture drafting and verification as CUDA graphs. None: if all levels are on the
            same CUDA device; never on the CPU. Only rounds without host synchronisation are
            captured. A step that cannot be captured runs uncaptured, with a warning.
        pack: pack weights for the CPU's matrix kernels (`HuggingFaceLevel`). "auto": in float32 on
            x86 with AVX2 or AVX-512, and in other data types; on CUDA, fuse the layers of bfloat16
            models of known families. None: "auto" for models loaded by path or id, False for model
            objects.
        policy: chooses the windows of every row before each round of the target, from `window` on:
            an object of `ps.policies`, any object with `next(report)`, or a name: "online",
            "cached-fsm", "joint" or "fixed". None: constant windows.
        sync_each_step: whether the host reads the result of each draft and verification before the
            next. None: on the CPU, and where it must: unbounded `rounds`, logits processors,
            a drafter on the host, levels on several devices, the end of a context.
            Else it reads once per round of the target.
        operators: operators that draw the tokens (`runtime.plan.Operators`).

    Attributes:
        names: names of the levels, target first, as in messages and statistics.
        levels: the levels that verify, as `Level` objects.
        drafter: the lowest level; None if the target decodes alone.
        vocab_sizes: for each level with a model, the bound of the ids that it may draw.
        window, rounds, tail, rule: as above, after defaults.
        prediction: predicted tokens per second of a planned chain (`planned`) with the relative
            uncertainty; None: not planned.

    Raises:
        TypeError: an argument, or an element of `levels`, has a wrong type.
        ValueError: windows, rule, device, dtype or vocabularies do not fit, a path has no model, a
            model gives logits that the operators cannot read (float64, on the meta device), or its
            cache cannot roll back. The message names the argument or the level.
    """

    def __init__(
        self,
        levels: Sequence[Any],
        window: Sequence[int] | None = None,
        *,
        rounds: Sequence[int] | None = None,
        tail: int = 0,
        rule: str = "token",
        dtype: torch.dtype | str | None = None,
        device: str | torch.device | None = None,
        check_vocabulary: bool = True,
        graphs: bool | Graphs | None = None,
        pack: Switch | None = None,
        policy: WindowPolicy | str | None = None,
        sync_each_step: bool | None = None,
        operators: Operators | None = None,
    ) -> None:
        things = elements(levels)
        self._set_windows(len(things), window, rounds, tail)
        arguments.rule(rule)
        self.rule = rule
        self.prediction: Prediction | None = None
        arguments.flag("check_vocabulary", check_vocabulary)
        if sync_each_step is not None:
            arguments.flag("sync_each_step", sync_each_step)
        if graphs is not None and not isinstance(graphs, bool):
            arguments.instance("graphs", graphs, rooms.graphs.Graphs)
        if isinstance(policy, str):
            policy = rooms.adaptive.named(policy)
        arguments.instance("policy", policy, WindowPolicy)
        arguments.instance("operators", operators, Operators)
        if pack is not None:
            arguments.switch("pack", pack)
        loading = arguments.loaded_dtype("dtype", dtype), arguments.device("device", device), pack
        self.policy = policy
        self._operators = operators or Operators()
        self._said: set[str] = set()  # warnings
        self._wants_graphs, self._sync_each_step = graphs, sync_each_step
        self._set_members(things, *loading, check_vocabulary)
        self._idle()

    def _set_windows(self, count: int, window: Any, rounds: Any, tail: Any) -> None:
        if window is None:
            window = [4 * 2**i for i in reversed(range(count - 1))]
        self.window = arguments.sizes("window", window, count - 1, count)
        if rounds is None:
            rounds = default_rounds(self.window)
        self.rounds = arguments.sizes("rounds", rounds, max(count - 2, 0), count)
        self.tail = arguments.integer("tail", tail, arguments.SIZE_MAX)
        if self.tail and count < 3:
            raise ValueError(
                f"tail: expected 0 for {count} levels, since no level verifies between drafter and "
                f"target, given {self.tail}"
            )

    def _set_members(
        self, things: Sequence[Any], dtype: Any, device: Any, pack: Any, check_vocabulary: bool
    ) -> None:
        """Set the levels that verify and the drafter, with their names and vocabulary sizes."""
        read, drafter = _resolved(things, dtype, device, pack)
        reason = getattr(read[0], "only_drafts", None)
        if reason is not None and len(things) > 1:
            raise ValueError(
                f"levels[0]: expected a target whose logits are those of the text alone, given "
                f"{_name(read[0])}: {reason}"
            )
        self.names = _distinct([_name(level) for level in read])
        _warn_of_order(self.names, read)
        if check_vocabulary:
            require_same_vocabulary(self.names, read)
        # A level never draws an id outside the vocabulary of the level above it.
        self.vocab_sizes = list(itertools.accumulate((level.vocab_size for level in read), min))
        self.drafter: Drafter | DraftModel | BatchedDrafter | None = drafter
        if drafter is not None and not isinstance(drafter, DraftModel):
            self.names.append(_name(drafter))
        elif len(read) > 1:
            paths: dict[str, Any] = (
                {} if drafter is None else {"paths": drafter.paths, "beam": drafter.beam}
            )
            size, draw = self.vocab_sizes.pop(), self._operators.draw
            self.drafter = DraftModel(read.pop(), size, draw, **paths)
        self.levels = read  # the levels that verify; the target is levels[0]

    @classmethod
    def planned(
        cls,
        levels: Sequence[Any],
        prompts: Prompt,
        max_new_tokens: int = 128,
        *,
        pack: Switch = "auto",
        seconds: float = 40.0,
        consider: bool = False,
        batch: int = 1,
        **options: Unpack[Parameters],
    ) -> Chain:
        """Return the chain of `levels` that `ps.plan` recommends for the requests; the target alone
        if speculation does not pay. The plan is computed once for the same levels, prompts and
        requests on a machine, and stored in the user's cache folder.

        Args:
            levels ... seconds, consider, batch, options: as for `ps.plan`. A plan is for calls of
                `batch` prompts (`prediction.batch`); another number needs another plan.

        Raises:
            TypeError, ValueError: as for `ps.plan`.
        """
        inputs.refuse(cls.planned, options, lacks=["rules"])
        arguments.flag("consider", consider)
        own: dict[str, Any] = {"pack": pack, "seconds": seconds, "batch": batch}
        return rooms.planner.load_or_plan(
            cls, levels, prompts, max_new_tokens, options, consider=consider, **own
        )

    @classmethod
    def from_plan(cls, path: str | Path) -> Chain:
        """Return the chain of a file written by ``plan --save`` or `Plan.save`, with the data
        types, devices and packed weights of its levels as planned. Nothing is timed.

        Raises:
            TypeError, ValueError: `path` is no path, the file is missing or has another form; as
                for `Chain`, if an element cannot be loaded any more.
        """
        saved = rooms.store.ChainFile.read("path", arguments.path("path", path))
        options: dict[str, Any] = {"rounds": saved.rounds, "tail": saved.tail, "rule": saved.rule}
        chain = cls(saved.loaded(), saved.window, **options)
        chain.prediction = Prediction(*saved.prediction)
        return chain

    def _idle(self) -> None:
        verifiers: Sequence[Any] = self.levels
        below = [] if self.drafter is None else levels_of(self.drafter)
        names = [*self.names[: len(verifiers)], *[self.names[-1]] * len(below)]
        self.owner = CacheOwner(list(zip(names, [*verifiers, *below], strict=True)))
        self._tokenizer = TargetTokenizer(verifiers[0], names[0])
        self._prefixes: rooms.prefixes.Prefixes | None = None  # of calls with `cache_prompt`
        levels: list[BatchedLevel] = [
            batched(level, name) for level, name in zip(verifiers, self.names, strict=False)
        ]
        drafter: BatchedDrafter | None = None
        sizes, devices = list(self.vocab_sizes), {level.device for level in levels}
        if isinstance(self.drafter, Drafter):
            from .drafters.proposals import ProposalDrafter

            drafter = ProposalDrafter(self.drafter, len(levels) + 1, sizes[-1], sizes[0])
        elif self.drafter is not None:
            drafter = self.drafter
            devices.add(drafter.device)
        if drafter is not None:
            sizes.append(drafter.vocab_size)
        drafters = [] if drafter is None else [drafter]
        config = ChainConfig(
            tuple(self.names),
            tuple(sizes),
            tuple(id_map_of(member).of_text(sizes[0]) for member in [*levels, *drafters]),
            tuple(self.window) or (0,),
            (*self.rounds, 0),
            self.rule,
            levels[0].device,
            self._operators,
            self.tail,
        )
        graphs = _graphs(self._wants_graphs, devices)
        self.engine = Engine(
            config, levels, drafter, graphs=graphs, sync_each_step=self._sync_each_step
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for `copy` and `pickle`: a copy is idle. Levels and drafters define
        how they are copied.

        Raises:
            RuntimeError: a call is running.
        """
        with self.owner.work():
            pass
        rebuilt = ("owner", "engine", "_tokenizer", "_prefixes")
        return {name: value for name, value in self.__dict__.items() if name not in rebuilt}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._idle()

    def _described(self) -> list[tuple[str, str]]:
        lines = [level_line(level) for level in self.levels]
        if isinstance(self.drafter, DraftModel):
            lines.append(level_line(self.drafter.level))
        elif self.drafter is not None:
            lines.append(f"{type(self.drafter).__name__}, no model")
        return list(zip(self.names, lines, strict=True))

    def _settings(self) -> str:
        tail = f", tail={self.tail}" if self.tail else ""
        return f"window={self.window}, rounds={self.rounds}{tail}, rule={self.rule!r}"

    def __repr__(self) -> str:
        """Return a line per level, target first, then windows, rounds and rules."""
        shown = [f"  {name}: {line}" for name, line in self._described()]
        return "\n".join(["Chain(", *shown, f"  {self._settings()}", ")"])

    def _repr_html_(self) -> str:
        rows = [(name, [line]) for name, line in self._described()]
        return rooms.columns.html("level", [""], rows, self._settings())

    def stream(
        self,
        input_ids: Tokenized,
        max_new_tokens: int = 256,
        *,
        stop: str | Sequence[str] | None = None,
        cache_prompt: bool = False,
        **options: Unpack[Parameters],
    ) -> Stream:
        """Continue a prompt like `generate`, and yield each new token when the target has committed
        it. A chain runs a single batch at a time: another call ends the stream.

        Args:
            input_ids: a single prompt, ``[N]`` or ``[1, N]``.
            max_new_tokens, options: as for `generate`, a single value each.
            stop: as for `generate`. The stream includes the tokens of a stop string, and tokens
                after it if only they decide its last character.
            cache_prompt: as for `batch`.

        Raises:
            TypeError, ValueError: as for `generate`; several prompts.
        """
        self._note_file()
        rows, mask = inputs.read("input_ids", input_ids)
        if len(rows) != 1:
            raise ValueError(
                f"input_ids: expected one prompt to stream, given {len(rows)}; use batch() for "
                "several"
            )
        requests = self.requests(
            self.stream, rows, max_new_tokens, options, mask=mask, padding=self._padding
        )
        [reader] = self._readers(stop, 1)
        return Stream(self.begin(requests, cache_prompt=cache_prompt), reader)

    def text_options(
        self, *, default_temperature: float = 0.0, **options: Unpack[Parameters]
    ) -> Parameters:
        """Return the parameters of a text or chat: of the call, else of the target's
        generation_config.json, else `default_temperature` and no filters. The file sets
        temperature, top_k, top_p, min_p and repetition_penalty; its temperature is 1 with do_sample
        alone, and `default_temperature` without do_sample. Warns once of other fields that change
        texts.

        Args:
            options: as for `generate`; None: not of the call. A rule without a repetition_penalty
                has the file's.
        """
        file = getattr(self.levels[0], "generation_config", {})
        merged, others = rooms.chat.text_options(file, default_temperature, options)
        self._say_once("texts and chats do not follow {} of its generation_config.json", others)
        return merged

    @property
    def _padding(self) -> int | None:
        # Texts have no padding; decoders of some models begin with the id of padding.
        encodes = hasattr(self.levels[0], "reads_encoder_input")
        return None if encodes else getattr(self.levels[0], "pad_token_id", None)

    def _note_file(self) -> None:
        file = getattr(self.levels[0], "generation_config", {})
        self._say_once(
            "its generation_config.json has {}, which generate_text and chat follow; calls "
            "with ids follow their arguments alone",
            file,
        )

    def _say_once(self, text: str, fields: Mapping[str, Any]) -> None:
        if fields and text not in self._said:
            self._said.add(text)
            shown = ", ".join(f"{name}={value!r:.40}" for name, value in fields.items())
            warnings.warn(f"{self.names[0]}: {text.format(shown)}", stacklevel=4)

    def _readers(self, stop: Any, count: int) -> list[rooms.chat.StopStrings | None]:
        stops = arguments.strings("stop", stop)
        if not stops:
            return [None] * count
        return [
            rooms.chat.StopStrings(self._tokenizer.require("stop"), stops) for _ in range(count)
        ]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_new_tokens: int = 256,
        *,
        stop: str | Sequence[str] | None = None,
        system: str | None = None,
        cache_prompt: bool = True,
        **options: Unpack[Parameters],
    ) -> Answer:
        """Answer a conversation through the chat template of the target's tokenizer. Returns an
        iterator over the answer's text; its `message` continues the conversation.

        Text that earlier calls have read is not read again (`batch`). Turns that exceed the
        context of the levels are left out, the oldest first.

        Args:
            messages: the oldest first, each a mapping with "role", "content" and other fields, as
                for `chat.chat_text`.
            max_new_tokens, cache_prompt, options: as for `stream`. Temperature, filters and rules
                are by default of the target's generation_config.json, if any, else greedy
                (`text_options`). Without `eos_token_id`, the tokenizer's EOS id ends the answer as
                well.
            stop: strings that end the answer; the answer excludes them.
            system: a system prompt before the messages.

        Raises:
            TypeError, ValueError: as for `stream`; `messages` has another form, the last message is
                too long, the template refuses, or the target has no tokenizer with a template.
        """
        tokenizer = self._tokenizer.find()
        if not rooms.chat.has_template(tokenizer):
            raise ValueError(
                f"chat: expected a target with a chat template beside it, given {self.names[0]}"
            )
        limit = arguments.integer("max_new_tokens", max_new_tokens)
        lengths = (member.max_length for member in self.engine.parts)
        context = min((length for length in lengths if length is not None), default=None)
        fitted = rooms.chat.fitted_prompt(tokenizer, messages, system, limit, context)
        if options.get("eos_token_id") is None:
            options["eos_token_id"] = rooms.chat.ends_of_turn(tokenizer, self.levels[0])
        requests = self.requests(
            self.chat, [fitted.prompt.input_ids], fitted.limit, self.text_options(**options)
        )
        [reader] = self._readers(stop, 1)
        stream = Stream(self.begin(requests, cache_prompt=cache_prompt), reader)
        return rooms.chat.Answer(tokenizer, fitted, stream, arguments.strings("stop", stop))

    def batch(
        self,
        prompts: Tokenized,
        max_new_tokens: Ints = 256,
        *,
        encoder_input_ids: Tokenized | EncodedInput | None = None,
        processors: LogitsProcessors | None = None,
        observe: Observer | None = None,
        cache_prompt: bool = False,
        **options: Unpack[Parameters],
    ) -> Batch:
        """Begin a batch of token lists; the caller runs it by ``advance()``.

        Args:
            prompts: as `input_ids` of `generate`, without padding but for a tokenizer's mask; the
                lists are copied.
            max_new_tokens, options: as for `generate`.
            encoder_input_ids: as for `generate`, or an `EncodedInput`, which has a mask as well.
            processors, observe: as for `Batch`. Processors apply after the rules.
            cache_prompt: use the prefix cache: keep keys, values and states of prompts and answers,
                and read only the new tokens of a prompt that earlier calls with `cache_prompt`
                began. Tokens and draws are the same: with packed weights bit for bit
                (`HuggingFaceLevel.varies`), else up to the rounding of passes of other lengths.
                Levels without support, e.g. with a streaming cache, read the whole prompt.
                A change of a model between calls empties the cache, which has 16384 tokens
                beside the prompts of the call. `Stats.num_cached_tokens` counts tokens not read
                again.

        Raises:
            TypeError, ValueError: as for `generate`.
        """
        rows, mask = inputs.read("prompts", prompts)
        requests = self.requests(
            self.batch, rows, max_new_tokens, options, name="prompts", mask=mask,
            encoder_input_ids=encoder_input_ids,
        )  # fmt: skip
        return self.begin(requests, processors, observe, cache_prompt)

    def requests(
        self,
        call: Callable[..., Any],
        rows: Sequence[list[int]],
        max_new_tokens: Ints,
        options: Parameters,
        *,
        name: str = "input_ids",
        mask: Any = None,
        padding: int | None = None,
        n: int = 1,
        encoder_input_ids: Tokenized | EncodedInput | None = None,
    ) -> list[Request]:
        """Check the arguments of `call`, and return `n` requests for each prompt.

        Args:
            call: refuses other arguments than `inputs.Options`.
            rows, mask: of `inputs.read`; padding: as for `inputs.prompts`.
            name: name of the prompts in errors.

        Raises:
            TypeError, ValueError: as for `generate`.
        """
        inputs.refuse(call, options)
        target, vocab_size = self.levels[0], self.vocab_sizes[0]
        reads = getattr(target, "reads_encoder_input", False)
        encoded = inputs.encoded(encoder_input_ids, reads, self.names[0])
        prompts = inputs.prompts(name, rows, vocab_size, mask, padding)
        bos = getattr(target, "bos_token_id", None)
        if bos is not None and [bos, bos] in [prompt[:2] for prompt in prompts]:
            self._say_once(
                "a prompt begins with two BOS tokens ({}), as of a chat template and a tokenizer "
                "that adds one: use add_special_tokens=False",
                {"bos_token_id": bos},
            )
        # Configurations name ids outside a smaller vocabulary: no fault of the caller.
        ends = [i for i in getattr(target, "eos_token_ids", ()) if 0 <= i < vocab_size]
        requests = inputs.requests(
            prompts, max_new_tokens, {"temperature": 0.0, **options}, vocab_size, ends, n=n,
            encoded=encoded,
        )  # fmt: skip
        for request in requests:
            inputs.require_room(self.names, self.engine.parts, request)
        return requests

    def begin(
        self,
        requests: Sequence[Request],
        processors: LogitsProcessors | None = None,
        observe: Observer | None = None,
        cache_prompt: bool = False,
    ) -> Batch:
        """Begin a batch of checked requests; other arguments as for `batch`."""
        arguments.flag("cache_prompt", cache_prompt)
        arguments.instance("processors", processors, LogitsProcessors)
        arguments.function("observe", observe, none=True)
        inputs.require_batches(self.names, self.engine.parts, len(requests))
        rows = [Row(number, request, self.names) for number, request in enumerate(requests)]
        options: dict[str, Any] = {"policy": self.policy, "processors": processors}
        options["observe"] = observe
        if not cache_prompt:
            return Batch(self.engine, self.owner, rows, **options)
        self._prefixes = self._prefixes or rooms.prefixes.Prefixes(_KEPT, _STATES)
        self._prefixes.capacity = _KEPT + sum(len(request.tokens) for request in requests)
        options["prefixes"] = self._prefixes
        return rooms.joining.OpenBatch(self.engine, self.owner, rows, **options)

    def generate(
        self,
        input_ids: Tokenized,
        max_new_tokens: Ints = 256,
        temperature: Floats = 0.0,
        top_k: Ints = 0,
        top_p: Floats = 1.0,
        min_p: Floats = 0.0,
        seed: Ints | None = None,
        eos_token_id: Ends | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        pad_token_id: int | None = None,
        encoder_input_ids: Tokenized | None = None,
        rules: Rules = None,
        stop: str | Sequence[str] | None = None,
        n: int = 1,
        logprobs: int = 0,
        **others: NoReturn,
    ) -> Output:
        """Continue prompts with exactly the target's distribution.

        Args:
            input_ids: a prompt, ``[N]`` or ``[1, N]``; or several, ``[B, N]`` with `attention_mask`
                or a list of rows of any length; B and N >= 1, integers in
                [0, vocab_size of the target). Or the mapping of a tokenizer with input_ids and
                perhaps attention_mask.
            max_new_tokens: never exceeded; >= 0. This and the next: a value, or a value per row.
            temperature, top_k, top_p, min_p: temperature and filters of the logits, the same on
                every level; temperature 0 is the target's argmax.
            seed: in [0, 2**64). The same seed and inputs give the same tokens, in any batch. A
                value s for B rows means ``ps.row_seeds(s, B)``: row 0 has s itself, as a single
                prompt, and the other rows have hashes of s and the row's number.
                None: a new seed for each call from torch's generator, so that
                ``torch.manual_seed`` fixes it; see `Output.seeds`. (A policy and an `NGramTable`
                learn from each call: the next call may draft, and so draw, otherwise.)
            eos_token_id: id or ids in [0, vocab_size) that end a text (and are kept), or a list of
                ids for each row; None: the ids of the target's configuration, []: none.
            attention_mask: ``[B, N]``, 0 where a row of `input_ids` is padding, on either side.
                None: the target's pad_token_id at the ends of rows of equal length is padding,
                unless it also ends texts.
            pad_token_id: fills the ends of short rows of the output. None: the first EOS id, or 0.
            encoder_input_ids: input of the encoders for an encoder-decoder target: a single text,
                ``[S]`` or ``[1, S]``, or a mapping as for `input_ids`; `input_ids` is then the
                beginning of the decoders' text.
            rules: penalties, biases, bad words and a least length: `LogitsRules` for all rows, or
                for each prompt.
            stop: strings that end a text, by the tokenizer beside the target's weights. A row
                keeps the tokens of its stop string; `Output.text` is the text before it.
            n: texts for each prompt, adjacent in the output. A value per prompt holds for each of
                its texts; seeds have a value per text.
            logprobs: number of likeliest ids in `Output.alternatives` for each new token; with
                temperature 0, `Output.logprobs` needs at least 1.

        Raises:
            TypeError, ValueError: bad input; begins with the argument's name, then the expected
                and the actual value.
            RequestError: a row of logits has no distribution (NaN, +inf, all -inf); names request,
                level and position. The chain stays usable.
        """
        self._note_file()
        ids, mask = inputs.unwrapped("input_ids", input_ids, attention_mask)
        rows = inputs.rows_of("input_ids", ids)
        if pad_token_id is not None:
            pad_token_id = arguments.int64("pad_token_id", pad_token_id)
        n = arguments.integer("n", n, arguments.SIZE_MAX, 1)
        options: dict[str, Any] = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "eos_token_id": eos_token_id,
            "rules": rules,
        }
        requests = self.requests(
            self.generate,
            rows,
            max_new_tokens,
            cast("Parameters", options | others),
            mask=mask,
            padding=self._padding,
            n=n,
            encoder_input_ids=encoder_input_ids,
        )
        fronts = [row for row in rows for _ in range(n)]
        table = fronts, pad_token_id, ids.device if isinstance(ids, torch.Tensor) else None
        return self.complete(requests, *table, stop=stop, logprobs=logprobs)

    def complete(
        self,
        requests: Sequence[Request],
        fronts: Sequence[list[int]],
        pad_token_id: int | None = None,
        device: torch.device | None = None,
        *,
        stop: str | Sequence[str] | None = None,
        logprobs: int = 0,
    ) -> Output:
        """Run a batch of checked requests to its end; arguments as for `generate`. Rows of
        `Output.sequences`, on `device`, begin with `fronts`."""
        logprobs = arguments.integer("logprobs", logprobs, arguments.SIZE_MAX)
        readers = self._readers(stop, len(requests))
        likely: list[list[Alternatives]] = [[] for _ in requests]

        def observe(row: int, logits: torch.Tensor) -> None:
            likely[row] += alternatives(batch.rows[row], logits, logprobs)

        batch = self.begin(requests, observe=observe if logprobs else None)
        rows = [StoppedRow(batch, number, reader) for number, reader in enumerate(readers)]
        try:
            complete(batch, rows)
        finally:
            self.owner.end(batch)
        new = [row.tokens for row in rows]
        texts = [[*front, *tokens] for front, tokens in zip(fronts, new, strict=True)]
        if pad_token_id is None:
            pad_token_id = min(requests[0].eos, default=0)
        return Output(
            padded(texts, device or torch.device("cpu"), pad_token_id)[0],
            batch.stats,
            [row.stats for row in batch.rows],
            [
                row.logprobs[: len(tokens)] if logprobs or not row.request.sampling.greedy else []
                for row, tokens in zip(batch.rows, new, strict=True)
            ],
            batch.seeds,
            new,
            self._tokenizer,
            [str(row.finish_reason) for row in rows],
            [row[: len(tokens)] for row, tokens in zip(likely, new, strict=True) if logprobs],
            [reader.text for reader in readers if reader is not None] or None,
        )

    def generate_text(
        self,
        prompt: str | Sequence[str],
        max_new_tokens: Ints = 256,
        *,
        stop: str | Sequence[str] | None = None,
        n: int = 1,
        logprobs: int = 0,
        system: str | None = None,
        raw: bool = False,
        **options: Unpack[Parameters],
    ) -> Output:
        """Answer a text, or several in a batch; `Output.text` has the answers.

        Args:
            prompt: read through the chat template of the target's tokenizer, if it has a template.
            max_new_tokens, stop, n, logprobs, options: as for `generate`. Temperature, filters and
                rules are by default of the target's generation_config.json, if any, else greedy
                (`text_options`).
            system: a system prompt for the template.
            raw: leave out the template, and continue the text itself.

        Raises:
            TypeError, ValueError: as for `generate`; the target has no tokenizer.
        """
        tokenizer = self._tokenizer.require("generate_text")
        texts = arguments.strings("prompt", prompt)
        if options.get("eos_token_id") is None and not raw and rooms.chat.has_template(tokenizer):
            options["eos_token_id"] = rooms.chat.ends_of_turn(tokenizer, self.levels[0])
        rows = [rooms.chat.prompt_of_text(tokenizer, text, system, raw).input_ids for text in texts]
        n = arguments.integer("n", n, arguments.SIZE_MAX, 1)
        requests = self.requests(
            self.generate_text, rows or [[]], max_new_tokens, self.text_options(**options), n=n
        )
        fronts = [request.tokens for request in requests]
        return self.complete(requests, fronts, stop=stop, logprobs=logprobs)


def _resolved(
    things: Sequence[Any], dtype: Any, device: Any, pack: Switch | None
) -> tuple[list[Level], Any]:
    """Return the models of a chain, and its drafter: None if that is the last of several models, a
    `DraftModel` if that drafts several paths."""
    models: list[Level] = []
    for n, thing in enumerate(things):
        name = f"levels[{n}]"
        _require_another(name, thing, things[:n])
        loaded = isinstance(thing, str | Path)
        packed: Switch = pack if pack is not None else "auto" if loaded else False
        entry = resolve(thing, Options(name, models, dtype, device, packed))
        if not is_drafter(entry):
            _require_apart(name, [entry], models)
            models.append(entry)
        elif 0 < n == len(things) - 1:
            _require_apart(name, levels_of(entry), models)
            if isinstance(entry, DraftModel):
                models.append(cast(Level, entry.level))
            return models, entry
        else:
            raise TypeError(
                f"{name} of {len(things)}: expected a model, given the drafter "
                f"{type(entry).__name__}; a drafter can only be the last of at least two"
            )
    return models, None


def _graphs(graphs: bool | Graphs | None, devices: set[torch.device]) -> Graphs | None:
    if graphs is not None and not isinstance(graphs, bool):
        return graphs
    device = next(iter(devices))
    possible = len(devices) == 1 and device.type == "cuda"
    if graphs is False or (graphs is None and not possible):
        return None
    if not possible:
        raise ValueError(
            "graphs: expected all levels on one CUDA device, given "
            + ", ".join(sorted(map(str, devices)))
        )
    return rooms.graphs.Graphs(rooms.graphs.CudaRecorder(device))


def _require_apart(name: str, levels: Sequence[object], above: Sequence[object]) -> None:
    """Refuse a level twice in a chain, and a level in a cache with no owner above it: its keys
    would overwrite the keys that the other level reads."""
    for earlier, other in enumerate(above):
        if any(level is other for level in levels):
            raise ValueError(
                f"{name}: expected a level of its own, given levels[{earlier}] again "
                f"({_name(other)}), whose cache holds one text only; a model is another level as "
                "a copy, or as ps.Level(copy, shares_cache_with=...)"
            )
    for level in levels:
        owner = getattr(level, "cache_owner", level)
        if owner is not level and not any(owner is other for other in above):
            names = ", ".join(map(_name, above)) or "nothing"
            raise ValueError(
                f"{name}: expected {_name(owner)}, whose cache {_name(level)} shares, above it, "
                f"given {names}"
            )


def _model_inside(thing: object) -> torch.nn.Module | None:
    if not isinstance(thing, torch.nn.Module):
        thing = getattr(thing, "model", None)
    return without_wrapper(thing) if isinstance(thing, torch.nn.Module) else None


def _require_another(name: str, thing: object, above: Sequence[object]) -> None:
    """Refuse a model, id or path twice: a level would draft for itself. Models with adapters are
    the same if the model inside is: all adapters act in its layers."""
    inside = _model_inside(thing)
    for earlier, other in enumerate(above):
        if inside is not None and inside is _model_inside(other) and with_adapters(inside):
            raise ValueError(
                f"{name}: expected another model than levels[{earlier}], given adapters in the "
                "same one, where they act on both levels; load the base model once for each level"
            )
        if not isinstance(thing, str | Path | torch.nn.Module):
            continue
        if other is thing or (isinstance(thing, str | Path) and other == thing):
            kind = type(thing).__name__ if isinstance(thing, torch.nn.Module) else repr(thing)
            raise ValueError(
                f"{name}: expected another model than levels[{earlier}], given {kind} again; a "
                "level below is a smaller model, or a copy that is cheaper to run"
            )


def _warn_of_order(names: Sequence[str], levels: Sequence[object]) -> None:
    """Warn of a level that is larger than the first: the target may not be first."""
    target, *below = (num_parameters(level) for level in levels)
    for number, size in enumerate(below, 1):
        if target is not None and size is not None and size > target:
            warnings.warn(
                f"levels[{number}]: expected no more parameters than the target has, given "
                f"{names[number]} with {size} below {names[0]} with {target}; the target, "
                "whose distribution the chain keeps, comes first",
                stacklevel=3,
            )


def _name(level: object) -> str:
    return str(getattr(level, "name", type(level).__name__))


def _distinct(names: list[str]) -> list[str]:
    return [n if names.count(n) == 1 else f"{n} (level {i + 1})" for i, n in enumerate(names)]
