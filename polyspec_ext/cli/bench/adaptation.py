"""``python -m polyspec_ext bench adaptation``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...bench import adaptation
from ...command import options


def add_command(kinds: Any) -> None:
    """Adds ``adaptation`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "adaptation",
        help="window policies beside the best fixed windows",
        description="Every window policy beside the best fixed windows, found by search, and "
        "beside an oracle: on recorded acceptance traces of the shipped models over several prompt "
        "sets, in simulated time, and live. Prints Markdown, or JSON.",
    )
    options.add_json(sub)
    options.add_json_file(sub)
    options.add_count(sub, "--prompts", 12, "of each set, in either half")
    sub.add_argument(
        "--half",
        choices=("held-out", "tuning"),
        default="held-out",
        help="of the prompts: whatever is chosen by looking at numbers is chosen on the one for "
        "tuning (default: %(default)s)",
    )
    sub.add_argument(
        "--data",
        type=options.folder,
        metavar="DIR",
        help="with gsm8k_test.jsonl, tinyshakespeare.txt and spec_bench_question.jsonl; what is "
        "not there is left out (default: shared/data beside the repository)",
    )
    sub.add_argument(
        "--traces",
        type=Path,
        metavar="FILE",
        help="read the traces from FILE, or record them there if there is none",
    )
    sub.add_argument(
        "--live",
        type=options.COUNT_OR_NONE,
        default=0,
        metavar="N",
        help="also generate from N prompts of each set (default: %(default)s)",
    )
    sub.add_argument(
        "--overhead", action="store_true", help="only the time that policies take themselves"
    )
    sub.add_argument("--plots", type=Path, metavar="DIR", help="draw PNGs there (matplotlib)")
    options.add_threads(sub)
    sub.set_defaults(run=adaptation.run)
