"""A chain inside `model.generate`: a left-padded batch with a logits processor, and statistics."""

from __future__ import annotations

from transformers import AutoModelForCausalLM, AutoTokenizer

import polyspec_ext as ps
from polyspec_ext import tiny


def main() -> None:
    prompts = [tiny.prompt_of(q) for q in ("What are 3 plus 4 apples?", "How many legs have cows?")]
    tokenizer = AutoTokenizer.from_pretrained(tiny.path("target"), padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(tiny.path("target"), dtype="float32")
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    options = {"max_new_tokens": 32, "repetition_penalty": 1.1, "do_sample": False}

    chain = ps.Chain([model, tiny.path("middle"), tiny.path("drafter")])
    out = model.generate(
        **inputs,
        **options,
        custom_generate=ps.custom_generate,
        chain=chain,
        return_dict_in_generate=True,
    )
    for text in tokenizer.batch_decode(out.sequences, skip_special_tokens=True):
        print(text)
    print(f"{out.stats.levels[0].mean_acceptance_length:.2f} tokens per verification")
    print("as without a chain:", out.sequences.equal(model.generate(**inputs, **options)))


if __name__ == "__main__":
    main()
