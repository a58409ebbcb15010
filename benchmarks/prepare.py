"""What it takes to prepare rows: reading, rendering, tokenizing, masks, the cache and packing.

    python benchmarks/prepare.py --tokenizer FOLDER --source chats.jsonl --workers 1 2
    python benchmarks/prepare.py --tokenizer FOLDER --source chats.jsonl --workers 2 --datasets --rounds 3
    python benchmarks/prepare.py … --tree . ../before      # of several source trees, in turns
    python benchmarks/prepare.py … --workers 1 --machines 1 2      # shared by processes as machines

FOLDER has a tokenizer with a chat template, and each line of the file `messages`. Every measurement is a new
process with an empty cache of rows. CPU seconds are those of all its processes; `serial` is the share of the
process that reads and hands out (with --workers 1, all but the rendering). `memory` is the largest sum of the
resident memory of all of them, sampled, in which a page that two of them share counts twice. --datasets:
`datasets.map` with equally many processes, the same template and tokenizer, without masks and packing.
--machines: so many processes, each with a cache of its own, share the work through a folder (data.cache); a
line for each, without memory.
"""

import argparse
import ctypes
import itertools
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
ROOT = Path(__file__).parents[1]


def main() -> None:
    """Prints a line for each measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--source", required=True)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tree", type=Path, nargs="+", default=[ROOT], help="folders that hold lptune/")
    parser.add_argument("--datasets", action="store_true")
    parser.add_argument("--machines", type=int, nargs="+", default=[])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--measure", choices=("lptune", "datasets"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(lptune if args.measure == "lptune" else datasets, args.tokenizer, args.source)
        return
    for _ in range(args.rounds):
        for num, size in itertools.product(args.workers, args.machines):
            machines(args.tokenizer, args.source, num, size)
        for num in args.workers if not args.machines else ():
            for what, tree in [
                *(("lptune", each) for each in args.tree),
                *[("datasets", ROOT)] * args.datasets,
            ]:
                with tempfile.TemporaryDirectory() as scratch:
                    command = [sys.executable, __file__, "--measure", what]
                    command += ["--tokenizer", args.tokenizer, "--source", args.source]
                    env = {
                        "PYTHONPATH": str(tree.resolve()),
                        "LPTUNE_DATA_WORKERS": str(num),
                        "SCRATCH": scratch,
                    }
                    with subprocess.Popen(
                        command, env=os.environ | env, stdout=subprocess.PIPE, text=True
                    ) as run:
                        most = 0
                        while run.poll() is None:  # from outside: looking takes time of a processor, too
                            most = max(most, resident(run.pid))
                            time.sleep(0.5)
                        said = run.stdout.read().splitlines()[-1:]
                    print(
                        f"{what:8} {tree} {num} workers:", *said, f"memory {most / 1e6:,.0f} MB", flush=True
                    )


def machines(tokenizer, source, num, size):
    """Prints a line for each of `size` machines, with `num` workers each."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable,
            __file__,
            "--measure",
            "lptune",
            "--tokenizer",
            tokenizer,
            "--source",
            source,
        ]
        shared = {"PYTHONPATH": str(ROOT), "LPTUNE_DATA_WORKERS": str(num), "GROUP_WORLD_SIZE": str(size)}
        shared["ROWS"] = f"file://{scratch}/rows"
        runs = []
        for number in range(size):
            own = {"SCRATCH": scratch, "XDG_CACHE_HOME": f"{scratch}/{number}", "GROUP_RANK": str(number)}
            env = os.environ | shared | own
            runs.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        for number, run in enumerate(runs):
            said = run.communicate()[0].splitlines()[-1:]
            print(f"machine {number} of {size}, {num} workers:", *said, flush=True)


def measure(prepare, tokenizer, source):
    """Prints what the work of `prepare(tokenizer, source)` takes, without imports and the tokenizer."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # to wait for those that outlive their parent
    work = prepare(tokenizer, source)
    started, before = time.perf_counter(), cpu(resource.RUSAGE_SELF)
    digest = work()
    wall, own = time.perf_counter() - started, cpu(resource.RUSAGE_SELF) - before
    with suppress(ChildProcessError):
        while True:
            os.wait()
    total = own + cpu(resource.RUSAGE_CHILDREN)
    print(f"{wall:.1f} s, {total:.1f} CPU s, serial {own / total:.1%}, {digest}", flush=True)


def lptune(tokenizer, source):
    """A function that prepares the rows and gives their digest."""
    from lptune.config import DataConfig
    from lptune.data import hf, load_tokenizer, prepare

    loaded = load_tokenizer(Path(tokenizer))
    cache = os.environ.get("ROWS", f"{os.environ['SCRATCH']}/rows")
    cfg = DataConfig(source=source, seq_len=1024, cache=cache)

    def work():
        rows, _, _ = prepare(cfg, loaded, seed=0, vocab_size=2**20)
        hf._process().close()
        return rows.digest[:12]

    return work


def datasets(tokenizer, source):
    """A function that tokenizes the rows and gives their number."""
    os.environ |= {"HF_HOME": os.environ["SCRATCH"], "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    loaded = AutoTokenizer.from_pretrained(tokenizer)

    def encode(batch):
        texts = loaded.apply_chat_template(batch["messages"], tokenize=False)
        return {"input_ids": loaded(texts, add_special_tokens=False)["input_ids"]}

    def work():
        rows = datasets.load_dataset("json", data_files=source, split="train")
        num = int(os.environ["LPTUNE_DATA_WORKERS"])
        return len(rows.map(encode, batched=True, num_proc=num, remove_columns=rows.column_names))

    return work


def cpu(who):
    """CPU seconds of this process or of its children."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def resident(pid):
    """Bytes of resident memory of a process and all below it."""
    below, sizes = defaultdict(list), {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                below[int(fields[1])].append(int(entry.name))
                sizes[int(entry.name)] = int(fields[21]) * resource.getpagesize()
    found, todo = 0, [pid]
    for each in todo:  # which grows
        found += sizes.get(each, 0)
        todo += below[each]
    return found


if __name__ == "__main__":
    main()
