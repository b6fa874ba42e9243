"""Training texts of a head: from files, as conversations through the target's chat template, and
with answers by the target; and their tokens, cut into rows of equal length."""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from polyspec_ext import progress
from polyspec_ext.chain import Chain
from polyspec_ext.chat import chat_prompt, has_template


class Document(NamedTuple):
    """Tokens of a text."""

    ids: torch.Tensor  # [N] int64
    begin: int = 0  # first learnt token; the target never writes earlier tokens


class Rows(NamedTuple):
    """Concatenated texts, cut into rows."""

    tokens: torch.Tensor  # [R, T] int64
    learnt: torch.Tensor  # [R, T] bool, whether a token is learnt


class Stream:
    """Endless rows of the documents, repeated with a new order and new cuts in each round. Row i is
    always the same. Documents must have at least two rows of tokens."""

    def __init__(self, documents: Sequence[Document], length: int, seed: int) -> None:
        self._documents, self._length, self._seed = documents, length, seed
        total = sum(len(doc.ids) for doc in documents)
        if total < 2 * length:
            raise ValueError(
                f"texts: expected at least {2 * length} tokens, given {total} in "
                f"{len(documents)} texts"
            )
        self._begins = [0]  # first row of each round
        self._latest = -1, Rows(torch.empty(0), torch.empty(0))

    def _round(self, number: int) -> Rows:
        """Shuffle, concatenate and cut documents, and shuffle the rows; cache the latest round."""
        if number != self._latest[0]:
            length, generator = self._length, torch.Generator().manual_seed(self._seed + number)
            order = torch.randperm(len(self._documents), generator=generator).tolist()
            documents = [self._documents[i] for i in order]
            # A random start moves the cuts, so that no document is always split at the same token.
            start = int(torch.randint(0, length, (1,), generator=generator))
            learnt = [torch.arange(len(doc.ids)) >= doc.begin for doc in documents]
            parts = [torch.cat(x)[start:] for x in ([doc.ids for doc in documents], learnt)]
            rows = [x[: len(x) // length * length].view(-1, length) for x in parts]
            mixed = torch.randperm(len(rows[0]), generator=generator)
            self._latest = number, Rows(*(x[mixed] for x in rows))
        return self._latest[1]

    def rows(self, begin: int, count: int) -> Rows:
        """Return rows begin to begin + count."""
        while self._begins[-1] < begin + count:
            self._begins.append(self._begins[-1] + len(self._round(len(self._begins) - 1).tokens))
        rows = []
        for i in range(begin, begin + count):
            number = bisect.bisect_right(self._begins, i) - 1
            rows.append([x[i - self._begins[number]] for x in self._round(number)])
        return Rows(*map(torch.stack, zip(*rows, strict=True)))


def frequent(documents: Sequence[Document], size: int, vocab_size: int) -> torch.Tensor:
    """Return the `size` most frequent ids, ascending. If the documents have fewer ids, add the
    lowest other ids, which are about the most frequent in byte-pair vocabularies."""
    counts = Counter(torch.cat([doc.ids for doc in documents]).tolist())
    counts.update(dict.fromkeys(range(vocab_size), 0))
    return torch.tensor(sorted(token for token, _ in counts.most_common(size)))


# Paragraphs of a plain file, joined to texts of at least 2000 characters.
_PASSAGE = re.compile(r"(.{2000,}?|.+)(?:\n\n|\Z)", re.DOTALL)
_BATCH = 16  # questions per batch
_SHARE, _MOST = 20, 64  # held-out texts: 1 in 20, at most 64
_KINDS = (
    '"messages" (mappings with "role" and "content"), or "question" with "answer" or without, or '
    '"text"'
)


class Text(NamedTuple):
    """A text before tokenization."""

    asked: tuple[dict[str, str], ...]  # messages, oldest first; empty for a plain text
    said: str | None  # answer, or plain text; None: to be answered by the target


def read_texts(files: Sequence[Path]) -> list[Text]:
    """Read the texts of files: a text per line of a ``.jsonl``, else passages between blank lines.
    ValueError: no texts, or a bad line; names the file and the line."""
    texts: list[Text] = []
    for file in files:
        content = file.read_text(encoding="utf-8")
        if file.suffix == ".jsonl":
            lines = enumerate(content.splitlines(), 1)
            texts += [_parsed(line, f"{file}:{i}") for i, line in lines if line.strip()]
        else:
            texts += [Text((), passage) for passage in _PASSAGE.findall(content) if passage.strip()]
    if not texts:
        raise ValueError(f"texts: expected texts or prompts, given none in {len(files)} files")
    return texts


def documents_of(
    texts: Sequence[Text], tokenizer: Any, model: Any, kept: Path, *, seed: int, **options: Any
) -> list[Document]:
    """Return the tokens of every text. The target `model` answers questions without an answer, in
    batches, question i with seed + i and `options` of `Chain.generate`. The file `kept` caches the
    answers."""
    bar = progress.bar(texts, desc="texts", mininterval=5, leave=False)
    prompts = [_prompt(text, tokenizer) for text in bar]
    said: dict[int, list[int]] = {}
    for i, text in enumerate(texts):
        if text.said is not None:
            ids = tokenizer(text.said, add_special_tokens=not prompts[i])["input_ids"]
            said[i] = [*ids, tokenizer.eos_token_id]
    unanswered = {i: prompt for i, prompt in enumerate(prompts) if i not in said}
    said |= _answers(unanswered, model, kept, seed, options)
    return [
        Document(torch.tensor([*prompt, *said[i]]), len(prompt)) for i, prompt in enumerate(prompts)
    ]


def split(documents: Sequence[Document], length: int) -> tuple[list[Document], list[Document]]:
    """Split documents into training and held-out documents; held-out texts are cut `length` tokens
    after their first learnt token. ValueError: fewer than 2 documents."""
    if len(documents) < 2:
        raise ValueError(f"texts: expected at least 2, one to be held out, given {len(documents)}")
    count = min(_MOST, max(1, len(documents) // _SHARE))
    places = {i * len(documents) // count for i in range(count)}
    learnt = [doc for i, doc in enumerate(documents) if i not in places]
    held_out = [documents[i] for i in sorted(places)]
    return learnt, [Document(doc.ids[: doc.begin + length], doc.begin) for doc in held_out]


def _parsed(line: str, where: str) -> Text:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: expected a JSON object a line: {error}") from error
    match entry:
        case {"text": str(text)} if text.strip():
            return Text((), text)
        case {"question": str(question)} if isinstance(entry.get("answer"), str | None):
            return Text(({"role": "user", "content": question},), entry.get("answer"))
        case {"messages": [*before, last] as messages} if all(map(_is_message, messages)):
            if last["role"] == "assistant" and before:
                return Text(tuple(before), last["content"])
            return Text(tuple(messages), None)
    raise ValueError(f"{where}: expected an object with {_KINDS}, given {line[:60]!r}")


def _is_message(value: Any) -> bool:
    kinds = {type(value.get(key)) for key in ("role", "content")} if type(value) is dict else ()
    return kinds == {str}


def _prompt(text: Text, tokenizer: Any) -> list[int]:
    if not text.asked:
        return []
    if has_template(tokenizer):
        return chat_prompt(tokenizer, text.asked).input_ids
    plain = "\n\n".join(message["content"] for message in text.asked) + "\n\n"
    ids: list[int] = tokenizer(plain)["input_ids"]
    return ids


def _answers(
    prompts: dict[int, list[int]], model: Any, cache: Path, seed: int, options: dict[str, Any]
) -> dict[int, list[int]]:
    """Return the target's answers to `prompts`, by number. `options`: for `Chain.generate`."""
    about = " ".join(map(str, (*options.values(), seed)))
    keys = {
        i: hashlib.sha256(f"{about} {i} {prompt}".encode()).hexdigest()[:24]
        for i, prompt in prompts.items()
    }
    known: dict[str, list[int]] = {}
    for line in cache.read_text(encoding="utf-8").splitlines() if cache.exists() else ():
        with contextlib.suppress(ValueError):  # a partial line of an interrupted run
            answer = json.loads(line)
            known[answer["key"]] = answer["ids"]
    # Batch similar lengths: the longest prompt determines a batch's time.
    missing = [i for i in prompts if keys[i] not in known]
    missing.sort(key=lambda i: len(prompts[i]))
    if missing:
        chain = Chain([model], pack="auto")
        cache.parent.mkdir(parents=True, exist_ok=True)
        bar = progress.bar(range(0, len(missing), _BATCH), desc="answers", mininterval=5)
        with cache.open("a", encoding="utf-8") as file:
            for begin in bar:
                batch = missing[begin : begin + _BATCH]
                out = chain.generate(
                    [prompts[i] for i in batch], **options, seed=[seed + i for i in batch]
                )
                for i, tokens in zip(batch, out.new_tokens, strict=True):
                    known[keys[i]] = list(tokens)
                    file.write("\n" + json.dumps({"key": keys[i], "ids": known[keys[i]]}))
                file.flush()
    return {i: known[key] for i, key in keys.items()}
