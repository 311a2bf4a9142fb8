"""Draws the loss curves of runs: python scripts/loss_picture.py OUT.png RUN [RUN ...]"""

import sys
from pathlib import Path

from k3train.metrics.picture import loss_picture

if __name__ == "__main__":
    out, *runs = sys.argv[1:]
    loss_picture({Path(run).name: Path(run) / "metrics.jsonl" for run in runs}, Path(out))
    print(out)
