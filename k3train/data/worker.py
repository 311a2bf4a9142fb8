"""A worker of ``data prepare`` (``data/workers.py``): jobs in and results out as lines of JSON. Imports no JAX.

It ends with its parent: where the parent's end of the pipe closes, it leaves at once, wherever it is.
"""

import json
import os
import queue
import sys
import threading
import traceback
from typing import Any

from k3train.config.errors import UserError
from k3train.data.piecework import Work, do
from k3train.data.tokenizer import load_tokenizer


def main() -> None:
    """Serve jobs until the parent closes the pipe."""
    # Nothing that a library prints may get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    work = Work.load(json.loads(lines.get()))
    tokenizer = None
    while True:
        job = json.loads(lines.get())
        try:
            if job["do"] == "piece" and tokenizer is None:
                tokenizer = load_tokenizer(work.config.tokenizer)
            answer: dict[str, Any] = {"result": do(work, tokenizer, job)}
        except UserError as error:
            answer = {"failure": {"kind": "user", "message": str(error), "code": int(error.exit_code)}}
        except OSError as error:
            path = str(error.filename or "")
            message = error.strerror or str(error)
            answer = {"failure": {"kind": "os", "errno": error.errno or 0, "message": message, "path": path}}
        except Exception:
            answer = {"failure": {"kind": "bug", "message": traceback.format_exc()}}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _listen(lines: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
