"""What strangers wrote: a model's folder that leads out of itself, numbers that are none, caches."""

import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lptune.data.cache import MIN_BYTES
from tests.faults.adversary.judge import DONE, EITHER, REFUSED, Case
from tests.faults.adversary.place import Finished, Place
from tests.faults.adversary.things import THINGS, put


def cases(rng: random.Random) -> Iterator[Case]:
    yield from _links_out()
    yield from _things_in_a_model()
    yield from _not_finite(rng)
    yield from _cached_rows(rng)
    yield from _cached_kernels(rng)


# ---- a model's folder

_FILES = (
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.txt",
    "merges.txt", "vocab.json", "x.tiktoken", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/x.jinja", "additional_chat_templates", "preprocessor_config.json", "README.md",
    "LICENSE", ".hidden.json", ".cache", "no_suffix", "weights.bin", "more.safetensors", "folder",
)  # fmt: skip


def _hub_link(path: Path, place: Place) -> None:
    """Dressed as the hub's cache, whose files are links to ../../blobs."""
    home = place.folder / "models--a--b"
    (home / "blobs").mkdir(parents=True)
    (home / "blobs" / "hash").symlink_to(place.victim / "file")
    path.symlink_to("../../blobs/hash")
    (home / "snapshots").mkdir()
    place.model.rename(home / "snapshots" / "main")
    place.model.symlink_to(home / "snapshots" / "main")


def _hub_blobs_out(path: Path, place: Place) -> None:
    home = place.folder / "models--a--b"
    (home / "snapshots").mkdir(parents=True)
    (home / "blobs").symlink_to(place.victim)
    path.symlink_to("../../blobs/file")
    place.model.rename(home / "snapshots" / "main")
    place.model.symlink_to(home / "snapshots" / "main")


def _through_a_folder(path: Path, place: Place) -> None:
    (place.model / "within").symlink_to(place.victim)
    path.symlink_to(place.model / "within" / "file")


_LINKS: dict[str, Callable[[Path, Place], object]] = {
    "absolute": lambda path, place: path.symlink_to(place.victim / "file"),
    "relative": lambda path, place: path.symlink_to(os.path.relpath(place.victim / "file", path.parent)),
    "to a folder": lambda path, place: path.symlink_to(place.victim / "folder"),
    "to /proc/self/environ": lambda path, place: path.symlink_to("/proc/self/environ"),
    "to the folder above": lambda path, place: path.symlink_to(".."),
    "through a linked folder": _through_a_folder,
    "as in the hub's cache": _hub_link,
    "by the hub's cache": _hub_blobs_out,
}
_READERS: dict[str, Callable[[Place], list[str]]] = {
    "run": lambda place: place.job(),
    "verify": lambda place: ["verify", "model"],
    "export --base": lambda place: [
        "export",
        str(shutil.copytree(place.finished, place.run)),
        "out",
        "--base=model",
    ],
}


def _links_out() -> Iterator[Case]:
    for name, link, command in itertools.product(_FILES, _LINKS, _READERS):

        def prepare(place: Place, name: str = name, link: str = link, command: str = command) -> list[str]:
            path = place.model / name
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)
            _LINKS[link](path, place)
            return _READERS[command](place)

        yield Case(
            subject="links out of a model",
            name=f"{command}, {name} is a link {link}",
            prepare=prepare,
            codes=REFUSED,
            then=_no_secret_told,
        )


def _no_secret_told(place: Place, done: Finished) -> str:
    told = (done.stdout or b"") + (done.stderr or b"")
    return "prints the secret" if b"s3cr3t" in told else ""


def _things_in_a_model() -> Iterator[Case]:
    # Links and files that are in order are above, or nothing wrong.
    things = [name for name in THINGS if "link" not in name and not name.startswith("file")]
    for name, thing, command in itertools.product(_FILES[::2], things, _READERS):

        def prepare(place: Place, name: str = name, thing: str = thing, command: str = command) -> list[str]:
            put(thing, place.model / name, place)
            return _READERS[command](place)

        yield Case(subject="things in a model", name=f"{command}, {name} is {thing}", prepare=prepare)


# ---- numbers that are none

_NOT_FINITE = {"NaN": float("nan"), "infinity": float("inf"), "-infinity": float("-inf")}


def _not_finite(rng: random.Random) -> Iterator[Case]:
    names = [
        "model.embed_tokens.weight", "model.norm.weight",
        *(f"model.layers.{rng.randrange(2)}.{part}.weight" for part in (
            "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
    ]  # fmt: skip
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    for name, value, dtype in itertools.product(names, _NOT_FINITE, dtypes):
        where = rng.choice((0.0, 1.0, rng.random()))
        command = rng.choice(("run", "verify"))

        def prepare(
            place: Place,
            name: str = name,
            value: str = value,
            dtype: torch.dtype = dtypes[dtype],
            where: float = where,
            command: str = command,
        ) -> list[str]:
            path = place.model / "model.safetensors"
            tensors = {key: tensor.to(dtype) for key, tensor in load_file(path).items()}
            flat = tensors[name].view(-1)
            flat[round(where * (len(flat) - 1))] = _NOT_FINITE[value]
            save_file(tensors, path, metadata={"format": "pt"})
            return _READERS[command](place)

        yield Case(
            subject="not finite",
            name=f"{command}, {value} in {name} of {dtype}",
            prepare=prepare,
            codes=REFUSED,
            then=lambda _, done, name=name: "" if name.encode() in done.stderr else f"does not name {name}",
        )


# ---- caches

_DAMAGES: dict[str, Callable[[Path, Place, random.Random], object]] = {
    "is empty": lambda path, place, rng: path.write_bytes(b""),
    "is cut": lambda path, place, rng: path.write_bytes(_cut(path.read_bytes(), rng)),
    "has a flipped bit": lambda path, place, rng: path.write_bytes(_flipped(path.read_bytes(), rng)),
    "has bytes more": lambda path, place, rng: path.write_bytes(path.read_bytes() + bytes(64)),
    "has the bytes of a stranger": lambda path, place, rng: path.write_bytes(rng.randbytes(4096)),
    "can be written by all": lambda path, place, rng: path.chmod(0o666),
    "can be written by its group": lambda path, place, rng: path.chmod(0o660),
    "was deleted": lambda path, place, rng: path.unlink(),
    **{
        f"is {name}": lambda path, place, rng, name=name: put(name, path, place)
        for name in THINGS
        if name != "file"
    },
}


def _cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(1, max(2, len(content)))]


def _flipped(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content or b"x")
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


_ARRAYS = (
    "tokens_T",
    "is_target_T",
    "offsets_N1",
    "answers_N2",
    "prompt_keys_N",
    "num_targets_N",
    "is_desirable_N",
)
_ENTRY = ("manifest.json", *(f"{name}.bin" for name in _ARRAYS))


def _same_run(place: Place, done: Finished) -> str:
    """A run that is done has the losses of one whose cache nobody touched."""
    if done.code != 0:
        return ""
    losses = [
        [line.split(b'"num_target')[0] for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
        for folder in (place.run, place.folder / "first")
    ]
    return "" if losses[0] == losses[1] else "trains with other numbers"


def _cached_rows(rng: random.Random) -> Iterator[Case]:
    for name, damage, cache in itertools.product((*_ENTRY, "KEY.lock", "KEY"), _DAMAGES, ("auto", "cache")):
        is_of_a_file = damage in list(_DAMAGES)[:8]
        if (name == "KEY" and is_of_a_file) or rng.random() < 0.5:
            continue

        def prepare(place: Place, name: str = name, damage: str = damage, cache: str = cache) -> list[str]:
            document = json.dumps({"text": "What is 2 + 2? " * 500}) + "\n"
            (place.folder / "large.jsonl").write_text(document * (MIN_BYTES // len(document) + 1))
            keys = ("data.source=large.jsonl", f"data.cache={cache}")
            assert place.lptune(place.job(*keys, "output_dir=first")).code == 0
            (entry,) = (path.parent for path in place.root.rglob("tokens_T.bin"))
            path = entry / name
            if name.startswith("KEY"):
                path = entry.with_name(name.replace("KEY", entry.name))
            _DAMAGES[damage](path, place, random.Random(damage))
            return place.job(*keys)

        yield Case(
            subject="cached rows",
            name=f"{name} {damage}, {cache}",
            prepare=prepare,
            codes=EITHER,
            may_change=("cache/lptune/data/*", "work/cache/*"),
            then=_same_run,
        )


def _canary(place: Place, done: Finished) -> str:
    return "a planted library ran" if (place.folder / "canary").exists() else ""


def _cached_kernels(rng: random.Random) -> Iterator[Case]:
    for damage in _DAMAGES:

        def prepare(place: Place, damage: str = damage) -> list[str]:
            cache = place.cache / "lptune"
            if not place.kernels.exists():
                assert place.lptune(place.job("precision.kind=int8_rowcol", "output_dir=first")).code == 0
                shutil.copytree(cache, place.kernels, ignore=shutil.ignore_patterns("data"))
                shutil.rmtree(place.folder / "first")
            shutil.rmtree(cache, ignore_errors=True)
            shutil.copytree(place.kernels, cache)
            (library,) = cache.glob("native-*.so*")
            _DAMAGES[damage](library, place, random.Random(damage))
            return place.job("precision.kind=int8_rowcol")

        yield Case(
            subject="cached kernels",
            name=f"the library {damage}",
            prepare=prepare,
            codes=DONE,
            may_change=("cache/*",),
            then=_canary,
        )
