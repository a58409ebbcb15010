"""A process that prepares chunks of rows for workers.py, with one thread, and with a process of its own that
renders chat templates (hf.py).

It reads lines of JSON from stdin: first the work, then chunks. For each chunk, `write_made` writes the answer
to stdout. It ends with its stdin. It imports neither torch nor transformers.
"""

import os
import signal
import sys
import traceback

from lptune.base.errors import UserError
from lptune.data.workers import Made, Work, read_chunk, write_made


def main() -> None:
    """Answers the chunks on stdin."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; stdin ends with its owner
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        work = Work.of_json(sys.stdin.buffer.readline())
        for line in sys.stdin.buffer:
            try:
                found: Made | UserError | str = work.make(read_chunk(line))
            except UserError as error:
                found = error
            except Exception:
                found = traceback.format_exc()
            write_made(answers, found)
            del line, found
    except BrokenPipeError:  # its owner has ended
        os._exit(1)


if __name__ == "__main__":
    main()
