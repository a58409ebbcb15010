"""`lptune download` against a hub on the loopback address: what is fetched, what is pinned, what is refused."""

# ruff: noqa: E501  (messages are compared whole)

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from huggingface_hub import constants

from lptune.base import hub_requests
from tests.cli.conftest import Command, Lptune, hub_environment, served

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "model.safetensors": b"weights",
    "model.safetensors.index.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer.model": b"sentencepiece",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ bos_token }}",
    "merges.txt": b"a b",
    "vocab.txt": b"a",
    "README.md": b"# a model",
    "pytorch_model.bin": b"pickle",
    "modeling_custom.py": b"import os",
    "training_args.pt": b"pickle",
    "consolidated.safetensors": b"the same weights again",
    "original/params.json": b"{}",
}
WANTED = {
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "vocab.txt",
}  # fmt: skip
LARGE = ("model.safetensors", "tokenizer.json")
REPOSITORIES = {"owner/good": FILES, "owner/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickle"}}


def git_sha1(content: bytes) -> str:
    """As the hub names small files."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download asks for."""

    requested: list[str]
    odd: Callable[["Hub", str], bool] = lambda hub, path: False
    """Answers a request itself and returns True, or leaves it."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        type(self).requested.append(path)
        if Hub.odd(self, path):
            return None
        parts = path.split("/")
        if parts[:2] == ["api", "models"]:
            name = "/".join(parts[2:4])
            revision = parts[5] if len(parts) > 5 else "main"
            if name == "owner/gated":
                return self.refuse(403, "GatedRepo")
            if name not in REPOSITORIES:
                return self.refuse(404, "RepoNotFound")
            if revision not in ("main", COMMIT):
                return self.refuse(404, "RevisionNotFound")
            files = REPOSITORIES[name]
            if parts[4:5] == ["tree"]:
                tree = [
                    {"type": "file", "oid": git_sha1(data), "size": len(data), "path": file}
                    for file, data in files.items()
                ]
                return self.send(json.dumps(tree).encode())
            siblings = [self.listed(file, data) for file, data in files.items()]
            return self.send(
                json.dumps({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}).encode()
            )
        name, file = "/".join(parts[:2]), "/".join(parts[4:])
        if parts[2:4] == ["resolve", COMMIT] and file in REPOSITORIES.get(name, {}):
            return self.send(REPOSITORIES[name][file])
        return self.refuse(404, "EntryNotFound")

    def listed(self, file: str, content: bytes) -> dict[str, object]:
        """A file of a repository; blobId of a large one is that of a pointer."""
        if Hub.odd is not _lfs or file not in LARGE:
            return {"rfilename": file, "blobId": git_sha1(content)}
        lfs = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "pointerSize": 134}
        return {"rfilename": file, "blobId": "c" * 40, "lfs": lfs}

    def send(self, content: bytes, *, etag: str = "", commit: str = COMMIT) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{etag or git_sha1(content)}"')
        self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def refuse(self, status: int, code: str, message: str = "") -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server of this test."""
    monkeypatch.setattr(Hub, "requested", [], raising=False)
    with served(Hub) as address:
        yield address


@pytest.fixture
def hub(lptune: Lptune, tmp_path: Path, endpoint: str) -> Lptune:
    """`lptune` in an environment whose hub is that server."""
    environment = hub_environment(endpoint, tmp_path)
    return lambda *arguments, **more: lptune(*arguments, **(environment | more))


@pytest.fixture
def here(command: Command, tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`command`, in this process, for which huggingface_hub has read the environment long ago."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf_home"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return command


def test_only_safetensors_json_and_tokenizer_files_are_fetched_and_the_commit_is_printed(
    hub: Lptune, tmp_path: Path
) -> None:
    done = hub("download", "owner/good")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "checkpoints" / "good"
    files = {path.name for path in folder.iterdir() if path.is_file()}
    assert files == WANTED
    assert all((folder / name).read_bytes() == FILES[name] for name in WANTED)
    assert done.stdout.splitlines() == [
        "downloaded owner/good to checkpoints/good",
        f"pinned: lptune download owner/good --revision {COMMIT} --output-dir checkpoints/good",
    ]
    fetched = {path.partition(f"resolve/{COMMIT}/")[2] for path in Hub.requested if "/resolve/" in path}
    assert fetched == WANTED
    pinned = hub("download", "owner/good", "--revision", COMMIT, "--output-dir", "again")
    assert pinned.returncode == 0
    assert {path.name for path in (tmp_path / "again").iterdir() if path.is_file()} == WANTED


LIST, TREE, WEIGHTS = "api/models/owner/good/revision/main", f"/tree/{COMMIT}", "/model.safetensors"
CONFIG = f"/{COMMIT}/config.json"


def _body(content: bytes) -> Callable[[Hub], None]:
    return lambda hub: hub.send(content)


NO_HUB = "does not answer as a hub does"


@pytest.mark.parametrize(
    ("ending", "answer", "message"),
    [
        (LIST, _body(b"<html>please log in</html>"), NO_HUB),
        (LIST, lambda hub: hub.refuse(500, ""), "500 Internal Server Error"),
        (LIST, lambda hub: hub.refuse(401, "", "Invalid credentials in Authorization header"), "does not accept the token"),
        (TREE, _body(b"{}"), "did not come from the hub as of 0123456789ab; download it again"),
        (WEIGHTS, lambda hub: hub.refuse(403, ""), "403: the token may not do this"),
        (WEIGHTS, lambda hub: hub.send(b"weights", commit="f" * 40), "did not come from the hub as of"),
        (WEIGHTS, lambda hub: hub.send(b"weights", etag="c" * 64), "differs from the file on the hub"),
        (CONFIG, lambda hub: hub.send(b"log in", etag=git_sha1(FILES["config.json"])), "differs from the file on the hub"),
    ],
)  # fmt: skip
def test_what_no_hub_answers_is_one_line_and_leaves_no_file_that_a_run_would_take(
    here: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
    answer: Callable[[Hub], None],
    message: str,
) -> None:
    def odd(hub: Hub, path: str) -> bool:
        is_asked = path.endswith(ending)
        if is_asked:
            answer(hub)
        return is_asked

    monkeypatch.setattr(Hub, "odd", odd)
    code, stdout, stderr = here("download", "owner/good")
    assert (code, stdout, stderr.count("\n")) == (2, "", 1), stderr
    assert message in stderr
    file = tmp_path / "checkpoints/good" / ending.rpartition("/")[2]
    assert ending not in (WEIGHTS, CONFIG) or not file.exists() or "did not come" in stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"checkpoints", "hf_home"}  # nothing beside them


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _lfs(hub: Hub, path: str) -> bool:
    """Sends and lists the two largest files as the hub does large ones."""
    name = path.rpartition("/")[2]
    if is_large := "/resolve/" in path and name in LARGE:
        hub.send(FILES[name], etag=hashlib.sha256(FILES[name]).hexdigest())
    return is_large


def test_a_download_of_another_repository_is_left_as_it_is(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert here("download", "owner/good", "--output-dir", "d")[0] == 0
    for path in (tmp_path / "d/.cache/huggingface/download").glob("*.metadata"):
        path.write_text(path.read_text().replace(COMMIT, "e" * 40))
    before = _contents(tmp_path / "d")
    message = (
        "error: d: holds a download of commit eeeeeeeeeeee, which owner/good may not have: has no such revision; "
        "choose another --output-dir\n"
    )
    assert here("download", "owner/good", "--output-dir", "d") == (2, "", message)
    assert _contents(tmp_path / "d") == before


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (
            "owner/pickled",
            {},
            "owner/pickled: holds no safetensors, only pytorch_model.bin, a pickle, which is never",
        ),
        ("owner/none", {}, "owner/none: is not on the hub, or private (set HF_TOKEN)"),
        ("owner/gated", {}, "owner/gated: is gated; accept its terms on the hub, then set HF_TOKEN"),
        ("owner/good --revision v9", {}, "owner/good@v9: has no such revision"),
        ("owner/good", {"HF_HUB_OFFLINE": "1"}, "owner/good: HF_HUB_OFFLINE is set"),
        (
            "owner/good",
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            "owner/good: http://127.0.0.1:9 does not answer as a",
        ),
        (
            "owner/good",
            {"HF_HUB_DOWNLOAD_TIMEOUT": "soon"},
            "huggingface_hub cannot be imported: invalid literal",
        ),
    ],
)
def test_what_cannot_be_downloaded_is_one_line_and_leaves_no_folder(
    hub: Lptune, here: Command, tmp_path: Path, arguments: str, environment: dict[str, str], message: str
) -> None:
    if environment:  # huggingface_hub reads them when it is imported
        done = hub("download", *arguments.split(), **environment)
        code, stdout, stderr = done.returncode, done.stdout, done.stderr
    else:
        code, stdout, stderr = here("download", *arguments.split())
    assert (code, stderr.count("\n")) == (2, 1), stderr
    assert message in stderr
    assert not stdout or "soon" in stdout, "which huggingface_hub prints"
    assert not (tmp_path / "checkpoints").exists()


def test_no_password_and_no_token_is_printed(
    here: Command, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    signed = "'403' for url 'https://a:b%40@c@cdn.co:81/x/y?X-Sig=1&b=2#f' (http://u:p'w@h/z), see a@b.c?d"
    cut = "'403' for url 'https://cdn.co:81/x/y' (http://h/z), see a@b.c?d"
    assert hub_requests.without_secrets(signed) == cut
    monkeypatch.setattr(constants, "ENDPOINT", endpoint.replace("//", "//user:s3cr3t@"))
    monkeypatch.setattr(Hub, "odd", lambda hub, path: bool(hub.refuse(500, "")) or True)
    for more, said in (((), "500"), (("--hf-token", "s3cr3t"), "set HF_TOKEN")):
        code, stdout, stderr = here("download", "owner/good", *more)
        assert (code, stdout, said in stderr, "s3cr3t" in stderr) == (2, "", True, False), stderr


@pytest.mark.parametrize("file", ["config.json", "checkpoints/step-00000004/state.json", "notes"])
@pytest.mark.parametrize("dest", ["mine", "checkpoints/good"])
def test_a_folder_that_is_no_download_is_left_as_it_is(
    here: Command, tmp_path: Path, file: str, dest: str
) -> None:
    theirs = tmp_path / "mine" / file
    theirs.parent.mkdir(parents=True)
    theirs.write_text("trained for a month")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "good").symlink_to("../mine")
    code, _, stderr = here("download", "owner/good", *([] if "/" in dest else ["--output-dir", dest]))
    assert (code, f"{dest}: is not empty, and no download lies there" in stderr) == (2, True)
    assert _contents(tmp_path / "mine") == {str(theirs): b"trained for a month"}
    assert Hub.requested == []


@pytest.mark.parametrize("is_large", [True, False])
def test_a_copy_without_times_and_a_kill_before_a_file_is_noted_are_no_obstacle(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    if is_large:
        monkeypatch.setattr(Hub, "odd", _lfs)
    assert here("download", "owner/good")[0] == 0
    shutil.copytree(tmp_path / "checkpoints/good", tmp_path / "copy")
    for name in WANTED:
        os.utime(tmp_path / "copy" / name, (2e9, 2e9))
    (tmp_path / "copy/merges.txt").unlink()
    for path in (tmp_path / "checkpoints/good/.cache/huggingface/download").iterdir():
        path.unlink()
    assert here("download", "owner/good")[0] == 0
    assert here("download", "owner/good", "--output-dir", "copy")[::2] == (0, "")
    assert all((tmp_path / "copy" / name).read_bytes() == FILES[name] for name in WANTED)


EDITED = "is not as it was downloaded, and would be overwritten; move it away, or"


@pytest.mark.parametrize(
    ("name", "time_s", "is_noted", "said"),
    [
        ("config.json", 2e9, True, EDITED),
        ("config.json", 1, True, EDITED),  # the hub's client takes an older file for what it has downloaded
        ("model.safetensors", 2e9, True, EDITED),
        ("model.safetensors", 2e9, False, EDITED),
        # The hub's client keeps it: only the digest tells.
        ("model.safetensors", 1, True, "differs from the file on the hub (another digest); remove it"),
    ],
)
def test_an_edited_file_is_named_and_left(
    here: Command, tmp_path: Path, name: str, time_s: float, is_noted: bool, said: str
) -> None:
    folder = tmp_path / "checkpoints" / "good"
    assert here("download", "owner/good")[0] == 0
    (folder / name).write_bytes(b"edited")
    os.utime(folder / name, (time_s, time_s))
    (folder / "notes.txt").write_text("mine")
    (folder / "merges.txt").unlink()  # what the download would bring
    if not is_noted:
        (folder / f".cache/huggingface/download/{name}.metadata").unlink()
    before = _contents(folder)
    code, stdout, stderr = here("download", "owner/good")
    assert (code, stdout) == (2, "")
    assert f"error: checkpoints/good/{name}: {said}" in stderr
    assert _contents(folder).items() >= {each for each in before.items() if ".cache" not in each[0]}


@pytest.mark.parametrize(
    ("called", "error", "code"),
    [
        ("file_download.http_get", OSError(errno.ENOSPC, "No space left"), 2),
        ("file_download.http_get", PermissionError(errno.EACCES, "Denied"), 2),
        ("snapshot_download", KeyError("a bug"), 1),
    ],
)
def test_neither_an_error_of_this_machine_nor_a_bug_is_said_to_be_the_hubs(
    here: Command, monkeypatch: pytest.MonkeyPatch, called: str, error: Exception, code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(f"huggingface_hub.{called}", fail)
    found, _, stderr = here("download", "owner/good")
    assert (found, NO_HUB in stderr) == (code, False)
    assert "Traceback" in stderr if code == 1 else str(error.args[1]) in stderr
