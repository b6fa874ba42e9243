"""``benchmarks paper``: Spec-Bench's questions, answered by every method in turns.

`questions` reads them, `conversation` makes prompts of them, `parts` and `methods` make what
answers, `runner` measures, and `record` is the form in which a run lies in its folder.
"""
