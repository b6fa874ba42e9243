"""Texts that a head learns from: files of them, conversations through the target's chat template,
and answers that the target gives itself; and their tokens, cut into rows of one length."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from polyspec_ext import progress
from polyspec_ext.chain import Chain
from polyspec_ext.chat import chat_prompt, has_template
from polyspec_ext.tuning import level_for


class Document(NamedTuple):
    """A text."""

    ids: torch.Tensor  # [N] int64
    begin: int = 0  # of what is learnt; before it is what the target never writes


class Rows(NamedTuple):
    """Texts end to end, cut."""

    tokens: torch.Tensor  # [R, T] int64
    learnt: torch.Tensor  # [R, T] bool, which of them are learnt


class Stream:
    """Endless rows: the documents again and again, each time in a new order and cut elsewhere. Row
    i is the same whenever it is asked for.

    Args:
        documents: at least two rows of tokens.

    Raises:
        ValueError: they have fewer.
    """

    def __init__(self, documents: Sequence[Document], length: int, seed: int) -> None:
        self._documents, self._length, self._seed = documents, length, seed
        self._rounds: dict[int, Rows] = {}
        self._begins = [0]  # of each round
        total = sum(len(one.ids) for one in documents)
        if total < 2 * length:
            raise ValueError(
                f"texts: expected at least {2 * length} tokens, given {total} in "
                f"{len(documents)} texts"
            )

    def _round(self, number: int) -> Rows:
        """Shuffled documents end to end, cut into rows, which are shuffled; the latest is kept."""
        if number in self._rounds:
            return self._rounds[number]
        length, generator = self._length, torch.Generator().manual_seed(self._seed + number)
        order = torch.randperm(len(self._documents), generator=generator).tolist()
        documents = [self._documents[i] for i in order]
        # A random start moves the cuts, so that no document is always split at the same place.
        start = int(torch.randint(0, length, (1,), generator=generator))
        count = (sum(len(one.ids) for one in documents) - start) // length
        mixed = torch.randperm(count, generator=generator)

        def cut(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(parts)[start : start + count * length].view(count, length)[mixed]

        learnt = [torch.arange(len(one.ids)) >= one.begin for one in documents]
        self._rounds = {number: Rows(cut([one.ids for one in documents]), cut(learnt))}
        return self._rounds[number]

    def rows(self, begin: int, count: int) -> Rows:
        """Rows begin to begin + count."""
        parts: list[Rows] = []
        number = 0
        while count:
            if number + 1 == len(self._begins):
                self._begins.append(self._begins[-1] + len(self._round(number).tokens))
            first, end = self._begins[number : number + 2]
            if begin < end:
                own, at = self._round(number), begin - first
                taken = min(count, end - begin)
                parts.append(Rows(own.tokens[at : at + taken], own.learnt[at : at + taken]))
                begin, count = begin + taken, count - taken
            number += 1
        return Rows(torch.cat([p.tokens for p in parts]), torch.cat([p.learnt for p in parts]))


def frequent(documents: Sequence[Document], size: int, vocab_size: int) -> torch.Tensor:
    """Return the `size` most frequent ids, ascending; where the documents have fewer, the lowest
    others as well, which in vocabularies of byte pairs are about the most frequent."""
    seen = Counter(chain.from_iterable(one.ids.tolist() for one in documents))
    known = [token for token, _ in seen.most_common(size)]
    rest = (token for token in range(vocab_size) if token not in seen)
    known += [token for token, _ in zip(rest, range(size - len(known)), strict=False)]
    return torch.tensor(sorted(known))


_PASSAGE = 2000  # characters of a plain file that become one text, at least
_BATCH = 16  # questions that are answered at once
_SHARE, _MOST = 20, 64  # of so many texts one is held out, and never more than that
_KINDS = (
    '"messages" (mappings with "role" and "content"), or "question" with "answer" or without, or '
    '"text"'
)


class Text(NamedTuple):
    """One text, not yet tokens."""

    asked: tuple[dict[str, str], ...]  # messages, the oldest first; none for a plain text
    said: str | None  # the answer to them, or the text; None: the target is to answer


def read_texts(files: Sequence[Path]) -> list[Text]:
    """Read the texts of files: of a ``.jsonl`` one a line, of others passages between blank lines.

    Raises:
        OSError: a file cannot be read.
        ValueError: there are none, or a line is none; names the file and the line.
    """
    found: list[Text] = []
    for file in files:
        content = file.read_text(encoding="utf-8")
        if file.suffix == ".jsonl":
            lines = enumerate(content.splitlines(), 1)
            found += [_parsed(line, f"{file}:{i}") for i, line in lines if line.strip()]
        else:
            found += [Text((), passage) for passage in _passages(content)]
    if not found:
        raise ValueError(f"texts: expected texts or prompts, given none in {len(files)} files")
    return found


def documents_of(
    texts: Sequence[Text],
    tokenizer: Any,
    model: Any,
    kept: Path,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> list[Document]:
    """Tokens of every text. Questions without an answer are answered by the target, in batches.

    Args:
        model: the target, of transformers.
        kept: a file of answers, which grows; those in it are not asked for again.
        max_new_tokens, temperature: of an answer.
        seed: of the answers; question i has seed + i.
    """
    prompts, said = [], {}
    for i, text in enumerate(progress.bar(texts, desc="texts", mininterval=5, leave=False)):
        prompts.append(_prompt(text, tokenizer))
        if text.said is not None:
            ids = tokenizer(text.said, add_special_tokens=not prompts[i])["input_ids"]
            said[i] = [*ids, tokenizer.eos_token_id]
    open_ = {i: prompt for i, prompt in enumerate(prompts) if i not in said}
    said |= _answers(open_, model, kept, max_new_tokens, temperature, seed)
    return [
        Document(torch.tensor([*prompt, *said[i]]), len(prompt)) for i, prompt in enumerate(prompts)
    ]


def split(documents: Sequence[Document], length: int) -> tuple[list[Document], list[Document]]:
    """Split documents into those to learn and those held out, of which no more than `length` tokens
    count.

    Raises:
        ValueError: fewer than two.
    """
    if len(documents) < 2:
        raise ValueError(f"texts: expected at least 2, one to be held out, given {len(documents)}")
    count = min(_MOST, max(1, len(documents) // _SHARE))
    places = {i * len(documents) // count for i in range(count)}
    learnt = [one for i, one in enumerate(documents) if i not in places]
    held_out = [documents[i] for i in sorted(places)]
    return learnt, [Document(one.ids[: one.begin + length], one.begin) for one in held_out]


def _parsed(line: str, where: str) -> Text:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: expected a JSON object a line: {error}") from error
    if isinstance(given, dict):
        messages, question, answer = (given.get(k) for k in ("messages", "question", "answer"))
        if isinstance(given.get("text"), str) and given["text"].strip():
            return Text((), given["text"])
        if isinstance(question, str) and isinstance(answer, str | None):
            return Text(({"role": "user", "content": question},), answer)
        if isinstance(messages, list) and messages and all(_is_message(one) for one in messages):
            if messages[-1]["role"] == "assistant" and len(messages) > 1:
                return Text(tuple(messages[:-1]), messages[-1]["content"])
            return Text(tuple(messages), None)
    raise ValueError(f"{where}: expected an object with {_KINDS}, given {line[:60]!r}")


def _is_message(given: Any) -> bool:
    return isinstance(given, dict) and all(
        isinstance(given.get(key), str) for key in ("role", "content")
    )


def _passages(content: str) -> Iterable[str]:
    """Join paragraphs until they have some length."""
    part = ""
    for paragraph in content.split("\n\n"):
        part += ("\n\n" if part else "") + paragraph
        if len(part) >= _PASSAGE:
            yield part
            part = ""
    if part.strip():
        yield part


def _prompt(text: Text, tokenizer: Any) -> list[int]:
    if not text.asked:
        return []
    if has_template(tokenizer):
        return chat_prompt(tokenizer, text.asked).input_ids
    plain = "\n\n".join(one["content"] for one in text.asked) + "\n\n"
    ids: list[int] = tokenizer(plain)["input_ids"]
    return ids


def _answers(
    prompts: dict[int, list[int]],
    model: Any,
    kept: Path,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> dict[int, list[int]]:
    """Return the target's answers to `prompts`, by number."""
    about = f"{max_new_tokens} {temperature} {seed}"
    keys = {
        i: hashlib.sha256(f"{about} {i} {prompt}".encode()).hexdigest()[:24]
        for i, prompt in prompts.items()
    }
    known = _known(kept)
    missing = [i for i in prompts if keys[i] not in known]
    if missing:
        # Alike lengths go together: a batch takes as long as its longest.
        missing.sort(key=lambda i: len(prompts[i]))
        chain = Chain([level_for(model, (1,), pack="auto")])
        kept.parent.mkdir(parents=True, exist_ok=True)
        bar = progress.bar(total=len(missing), desc="answers", mininterval=5)
        with kept.open("a", encoding="utf-8") as file, bar:
            for begin in range(0, len(missing), _BATCH):
                part = missing[begin : begin + _BATCH]
                out = chain.generate(
                    [prompts[i] for i in part],
                    max_new_tokens=max_new_tokens,
                    temperature=temperature,
                    seed=[seed + i for i in part],
                )
                for i, row, stats in zip(part, out.sequences.tolist(), out.requests, strict=True):
                    at = len(prompts[i])
                    known[keys[i]] = row[at : at + stats.num_new_tokens]
                    file.write(json.dumps({"key": keys[i], "ids": known[keys[i]]}) + "\n")
                file.flush()
                bar.update(len(part))
    return {i: known[key] for i, key in keys.items()}


def _known(kept: Path) -> dict[str, list[int]]:
    """Answers of an earlier run; its last line may be a part of one."""
    if not kept.exists():
        return {}
    found = {}
    content = kept.read_text(encoding="utf-8")
    whole = content[: content.rfind("\n") + 1]
    if whole != content:
        kept.write_text(whole, encoding="utf-8")
    for line in whole.splitlines():
        one = json.loads(line)
        found[one["key"]] = one["ids"]
    return found
