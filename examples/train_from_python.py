"""Take a recipe, change it in Python, train it in this process, and read its numbers.

    python examples/train_from_python.py [key=value ...]

A second start with the same settings continues from the newest checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from megatron_binac import ranks, recipes, report, run_folder
from megatron_binac.config import override

RUN_DIR = Path("runs/train_from_python")
SETTINGS = ["num_steps=60", "save_every=20", "eval.every=20", "bilevel.lam=0.2"]


def main() -> int:
    config = override(recipes.get("quickstart"), [*SETTINGS, *sys.argv[1:]])
    run_folder.claim(RUN_DIR, config, fresh=False)
    ranks.become_single(os.environ)

    from megatron_binac.training.setup import run_training  # the first import of torch

    resume = run_folder.latest_checkpoint(RUN_DIR) is not None
    code = run_training(config, RUN_DIR, resume=resume)
    if code != 0:
        return code  # stopped by a signal, after saving

    print(report.results_table([RUN_DIR]))
    for path in report.write_report([RUN_DIR], None):
        print(path)
    rows = [json.loads(line) for line in (RUN_DIR / "metrics.jsonl").read_text().splitlines()]
    gap = [row["critic/lead/gap"] for row in rows if "critic/lead/gap" in row]
    if gap:
        print(f"V* - V over the last steps: {gap[-5:]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
