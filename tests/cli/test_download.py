"""`lptune download` against a hub on the loopback address: what is fetched, what is pinned, what is refused."""

# ruff: noqa: E501  (messages are compared whole)

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from lptune.base import hub_requests
from tests.cli.conftest import Command, Lptune

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
            siblings = [{"rfilename": file, "blobId": git_sha1(data)} for file, data in files.items()]
            return self.send(
                json.dumps({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}).encode()
            )
        name, file = "/".join(parts[:2]), "/".join(parts[4:])
        if parts[2:4] == ["resolve", COMMIT] and file in REPOSITORIES.get(name, {}):
            return self.send(REPOSITORIES[name][file])
        return self.refuse(404, "EntryNotFound")

    def send(self, content: bytes, *, etag: str = "", commit: str = COMMIT) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{etag or git_sha1(content)}"')
        self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server of this test."""
    monkeypatch.setattr(Hub, "requested", [], raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    monkeypatch.setattr(server, "handle_error", lambda request, address: None)  # a client has left
    thread = threading.Thread(target=server.serve_forever, args=[0.02], daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def hub(lptune: Lptune, tmp_path: Path, endpoint: str) -> Lptune:
    """`lptune` in an environment whose hub is that server."""
    environment = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "hf_home"),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
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


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["owner/pickled"], {}, "owner/pickled: holds no safetensors, only pytorch_model.bin, a pickle, which is never loaded; choose a repository or revision that does"),
        (["owner/none"], {}, "owner/none: is not on the hub, or private (set HF_TOKEN)"),
        (["owner/gated"], {}, "owner/gated: is gated; accept its terms on the hub, then set HF_TOKEN"),
        (["owner/good", "--revision", "v9"], {}, "owner/good@v9: has no such revision"),
        (["not a repo"], {}, "not a repo: is not a repository id; give OWNER/NAME, e.g. Qwen/Qwen3-0.6B"),
        (["owner/good"], {"HF_HUB_OFFLINE": "1"}, "owner/good: HF_HUB_OFFLINE is set"),
        (["owner/good"], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "owner/good: http://127.0.0.1:9 does not answer as a hub does: "),
    ],
)  # fmt: skip
def test_what_cannot_be_downloaded_is_one_line_and_leaves_no_folder(
    hub: Lptune, tmp_path: Path, arguments: list[str], environment: dict[str, str], message: str
) -> None:
    done = hub("download", *arguments, **environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith(f"error: {message}")
    assert not (tmp_path / "checkpoints").exists()


LIST, TREE, WEIGHTS = "api/models/owner/good/revision/main", f"/tree/{COMMIT}", "/model.safetensors"
CONFIG = f"/{COMMIT}/config.json"


def _body(content: bytes) -> Callable[[Hub], None]:
    return lambda hub: hub.send(content)


def _listed(**fields: object) -> Callable[[Hub], None]:
    siblings = [{"rfilename": "model.safetensors"}]
    return _body(json.dumps({"id": "owner/good", "sha": COMMIT, "siblings": siblings, **fields}).encode())


NO_HUB = "does not answer as a hub does"


@pytest.mark.parametrize(
    ("ending", "answer", "message"),
    [
        (LIST, _body(b"<html>please log in</html>"), NO_HUB),
        (LIST, _body(b"[1]"), NO_HUB),
        (LIST, lambda hub: hub.refuse(500, ""), "500 Internal Server Error"),
        (TREE, _body(b"<html>please log in</html>"), NO_HUB),
        (TREE, _body(b"{}"), "did not come from the hub as of 0123456789ab; download it again"),
        (WEIGHTS, lambda hub: hub.refuse(403, ""), "403: the token may not do this"),
        (WEIGHTS, lambda hub: hub.send(b"weights", commit="f" * 40), "did not come from the hub as of"),
        (WEIGHTS, lambda hub: hub.send(b"weights", etag="c" * 64), "differs from the file on the hub"),
        (WEIGHTS, lambda hub: hub.send(b"weigh", etag=git_sha1(b"weights")), "differs from the file on the hub"),
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


def test_an_older_download_is_not_taken_for_one_of_the_commit_that_was_asked_for(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert here("download", "owner/good")[0] == 0
    newer = "f" * 40

    def odd(hub: Hub, path: str) -> bool:
        if path == LIST:
            _listed(sha=newer)(hub)
        elif newer in path:  # huggingface_hub then takes the folder that is there
            hub.refuse(403, "")
        return path == LIST or newer in path

    monkeypatch.setattr(Hub, "odd", odd)
    code, stdout, stderr = here("download", "owner/good")
    assert (code, stdout) == (2, "")
    assert "model.safetensors: did not come from the hub as of ffffffffffff" in stderr


def test_a_variable_with_which_huggingface_hub_cannot_be_imported_is_one_line(hub: Lptune) -> None:
    done = hub("download", "owner/good", HF_HUB_DOWNLOAD_TIMEOUT="soon")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "huggingface_hub cannot be imported: invalid literal for int() with base 10: 'soon'" in done.stderr


@pytest.mark.parametrize("status", [403, 500])
def test_a_password_in_the_endpoint_is_not_in_what_the_hub_is_said_to_have_refused(
    here: Command, monkeypatch: pytest.MonkeyPatch, endpoint: str, status: int
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint.replace("//", "//user:s3cr3t@"))
    monkeypatch.setattr(Hub, "odd", lambda hub, path: bool(hub.refuse(status, "")) or True)
    code, stdout, stderr = here("download", "owner/good")
    assert (code, stdout, stderr.count("\n")) == (2, "", 1), stderr
    assert str(status) in stderr
    assert "s3cr3t" not in stderr


def test_addresses_are_printed_without_what_may_be_secret() -> None:
    signed = "'403' for url 'https://a:b%40@c@cdn.co:81/x/y?X-Sig=1&b=2#f' (http://u:p'w@h/z), see a@b.c?d"
    cut = "'403' for url 'https://cdn.co:81/x/y' (http://h/z), see a@b.c?d"
    assert hub_requests.without_secrets(signed) == cut


def test_a_token_is_no_option(hub: Lptune) -> None:
    done = hub("download", "owner/good", "--token", "secret")
    assert done.returncode == 2
    assert "--token" in done.stderr


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--ignore-patterns", "only safetensors, JSON and tokenizer files are fetched"),
        ("--hf-token", "set HF_TOKEN"),
    ],
)
def test_an_option_of_torchtunes_download_is_answered_without_repeating_its_value(
    command: Command, option: str, said: str
) -> None:
    code, stdout, stderr = command("download", "owner/name", option, "s3cret")
    assert (code, stdout) == (2, "")
    assert said in stderr
    assert "s3cret" not in stderr


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("target", "what"),
    [("dest", "a link to nowhere"), ("nowhere", "a link to nowhere"), ("file", "not a folder")],
)
def test_a_link_that_leads_to_no_folder_is_no_place_for_a_download(
    here: Command, tmp_path: Path, target: str, what: str
) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "dest").symlink_to(target)
    message = f"error: dest: is {what}; choose another --output-dir\n"
    assert here("download", "owner/good", "--output-dir", "dest") == (2, "", message)
    assert not (tmp_path / "nowhere").exists()
    assert (tmp_path / "file").read_text() == "precious"


THEIRS = [
    "config.json",
    "model.safetensors",
    "checkpoints/step-00000004/state.json",
    "export/config.json",
    "notes",
]


@pytest.mark.parametrize("dest", ["mine", "linked", "checkpoints/good"])
@pytest.mark.parametrize("file", THEIRS)
def test_a_folder_that_is_no_download_is_left_as_it_is(
    here: Command, tmp_path: Path, file: str, dest: str
) -> None:
    theirs = tmp_path / "mine" / file
    theirs.parent.mkdir(parents=True)
    theirs.write_text("trained for a month")
    (tmp_path / "linked").symlink_to("mine")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "good").symlink_to("../mine")
    before = _contents(tmp_path / "mine")
    assert here("download", "owner/good", *([] if "/" in dest else ["--output-dir", dest])) == (
        2,
        "",
        f"error: {dest}: is not empty, and no download lies there; choose another --output-dir\n",
    )
    assert _contents(tmp_path / "mine") == before
    assert Hub.requested == []


def test_an_edited_config_survives_a_rerun_that_completes_the_download(here: Command, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "good"
    assert here("download", "owner/good")[0] == 0
    assert here("download", "owner/good")[0] == 0
    _edit(folder / "config.json")
    (folder / "model.safetensors").unlink()
    (folder / "notes.txt").write_text("mine")
    code, stdout, stderr = here("download", "owner/good")
    assert (code, stderr) == (0, "")
    kept = "kept: checkpoints/good/config.json, which was changed since it was downloaded; remove it to get the hub's"
    assert stdout.splitlines()[0] == kept
    assert (folder / "config.json").read_bytes() == b"edited"
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def _lfs(hub: Hub, path: str) -> bool:
    """Sends the two largest files as the hub sends large ones."""
    name = path.rpartition("/")[2]
    if is_large := "/resolve/" in path and name in ("model.safetensors", "tokenizer.json"):
        hub.send(FILES[name], etag=hashlib.sha256(FILES[name]).hexdigest())
    return is_large


def test_an_edited_large_file_is_kept_and_said(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "odd", _lfs)
    assert here("download", "owner/good")[0] == 0
    _edit(tmp_path / "checkpoints/good/tokenizer.json")
    code, stdout, stderr = here("download", "owner/good")
    assert (code, stderr) == (0, "")
    assert stdout.startswith("kept: checkpoints/good/tokenizer.json, ")
    assert (tmp_path / "checkpoints/good/tokenizer.json").read_bytes() == b"edited"


@pytest.mark.parametrize("is_large", [True, False])
def test_a_kill_before_huggingface_hub_has_noted_a_file_is_no_obstacle(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    def odd(hub: Hub, path: str) -> bool:  # blobId is then that of a pointer
        if path == LIST:
            sha256 = hashlib.sha256(FILES["model.safetensors"]).hexdigest()
            lfs = {"size": 7, "sha256": sha256, "pointerSize": 134}
            weights = {"rfilename": "model.safetensors", "blobId": "c" * 40, "lfs": lfs}
            config = {"rfilename": "config.json", "blobId": git_sha1(FILES["config.json"])}
            _listed(siblings=[weights, config])(hub)
        return path == LIST or _lfs(hub, path)

    if is_large:
        monkeypatch.setattr(Hub, "odd", odd)
    folder = tmp_path / "checkpoints" / "good"
    assert here("download", "owner/good")[0] == 0
    for path in (folder / ".cache/huggingface/download").iterdir():
        path.unlink()
    code, stdout, stderr = here("download", "owner/good")
    assert (code, stderr, "kept" in stdout) == (0, "", False)


@pytest.mark.parametrize("is_large", [True, False])
def test_a_copy_without_times_is_completed(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    if is_large:
        monkeypatch.setattr(Hub, "odd", _lfs)
    assert here("download", "owner/good")[0] == 0
    shutil.copytree(tmp_path / "checkpoints/good", tmp_path / "copy")
    for name in WANTED:
        os.utime(tmp_path / "copy" / name, (2e9, 2e9))
    (tmp_path / "copy/merges.txt").unlink()
    code, stdout, stderr = here("download", "owner/good", "--output-dir", "copy")
    assert (code, stderr, "kept" in stdout) == (0, "", False)
    assert all((tmp_path / "copy" / name).read_bytes() == FILES[name] for name in WANTED)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_edit_with_an_older_time_is_seen(here: Command, tmp_path: Path, name: str) -> None:
    file = tmp_path / "checkpoints/good" / name
    assert here("download", "owner/good")[0] == 0
    file.write_bytes(b"edited")
    os.utime(file, (1, 1))  # so huggingface_hub takes it for what it has downloaded
    code, stdout, stderr = here("download", "owner/good")
    if name == "config.json":
        assert (code, stdout.partition(",")[0]) == (0, "kept: checkpoints/good/config.json")
    else:
        assert (code, stdout) == (2, "")
        assert "differs from the file on the hub (another digest); remove it" in stderr
    assert file.read_bytes() == b"edited"


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left"), PermissionError(errno.EACCES, "Denied")]
)
def test_an_error_of_this_machine_is_not_said_to_be_the_hubs(
    here: Command, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
    code, stdout, stderr = here("download", "owner/good")
    assert (code, stdout, stderr.count("\n")) == (2, "", 1), stderr
    assert str(error.strerror) in stderr
    assert NO_HUB not in stderr


@pytest.mark.parametrize("kind", [TypeError, KeyError, ValueError])
def test_a_bug_of_ours_is_not_said_to_be_the_hubs(
    here: Command, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise kind("a bug")

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    code, _, stderr = here("download", "owner/good")
    assert code == 1
    assert "Traceback" in stderr
    assert NO_HUB not in stderr


def _edit(file: Path) -> None:
    file.write_bytes(b"edited")
    later = file.stat().st_mtime + 5
    os.utime(file, (later, later))


@pytest.mark.parametrize("is_noted", [True, False])
def test_changed_weights_are_named_and_left(here: Command, tmp_path: Path, is_noted: bool) -> None:
    folder = tmp_path / "checkpoints" / "good"
    assert here("download", "owner/good")[0] == 0
    _edit(folder / "model.safetensors")
    if not is_noted:
        (folder / ".cache/huggingface/download/model.safetensors.metadata").unlink()
    before = _contents(folder)
    message = (
        "error: checkpoints/good/model.safetensors: is not as it was downloaded, and would be overwritten; "
        "move it away, or choose another --output-dir\n"
    )
    assert here("download", "owner/good") == (2, "", message)
    assert _contents(folder) == before


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
