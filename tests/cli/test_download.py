"""`lptune download` against a hub on the loopback address: what is fetched, what is pinned, what is refused."""

# ruff: noqa: E501  (messages are compared whole)

import hashlib
import io
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

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
        (["owner/good", "--revision", "v9"], {}, "owner/good: has no revision 'v9'"),
        (["not a repo"], {}, "not a repo: is not a repository id; give OWNER/NAME, e.g. Qwen/Qwen3-0.6B"),
        (["owner/good"], {"HF_HUB_OFFLINE": "1"}, "owner/good: cannot be downloaded: HF_HUB_OFFLINE is set"),
        (["owner/good"], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "owner/good: cannot be downloaded: "),
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


def _body(content: bytes) -> Callable[[Hub], None]:
    return lambda hub: hub.send(content)


def _listed(**fields: object) -> Callable[[Hub], None]:
    siblings = [{"rfilename": "model.safetensors"}]
    return _body(json.dumps({"id": "owner/good", "sha": COMMIT, "siblings": siblings, **fields}).encode())


def _cut(hub: Hub) -> None:
    hub.send(b"weigh", etag=git_sha1(b"weights"))


NO_HUB = "does not answer as a hub does"


@pytest.mark.parametrize(
    ("ending", "answer", "message"),
    [
        (LIST, _body(b"<html>please log in</html>"), NO_HUB),
        (LIST, _body(b""), NO_HUB),
        (LIST, _body(b'{"id": "owner/good", "sib'), NO_HUB),
        (LIST, _body(b"[1]"), NO_HUB),
        (LIST, _body(b"null"), NO_HUB),
        (LIST, _body(b"\xff\xfe\x00"), NO_HUB),
        (LIST, _body(100_000 * b"["), NO_HUB),
        (LIST, _listed(siblings=[1]), NO_HUB),
        (LIST, _listed(siblings=[{"rfilename": 5}]), "holds no safetensors"),
        (LIST, _listed(sha=None), "(None is not a commit)"),
        (LIST, _listed(sha="../../../outside"), "('../../../outside' is not a commit)"),
        (LIST, lambda hub: hub.refuse(500, ""), "500 Internal Server Error"),
        (TREE, _body(b"<html>please log in</html>"), NO_HUB),
        (TREE, _body(b"{}"), "did not come from the hub as of 0123456789ab; download it again"),
        (TREE, _body(b"[5]"), NO_HUB),
        (WEIGHTS, lambda hub: hub.refuse(403, ""), "403 Forbidden"),
        (WEIGHTS, lambda hub: hub.send(b"weights", commit="f" * 40), "did not come from the hub as of"),
        (WEIGHTS, lambda hub: hub.send(b"weights", etag="c" * 64), "differs from the file on the hub"),
        (WEIGHTS, _cut, "differs from the file on the hub"),
        (LIST, _listed(siblings=[{"rfilename": "model.safetensors"}, {"rfilename": "\0.json"}]), "is not a file name"),
    ],
)  # fmt: skip
def test_what_no_hub_answers_is_one_line_and_leaves_no_weights_that_a_run_would_take(
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
    folder = tmp_path / "checkpoints" / "good"
    assert ending != WEIGHTS or not (folder / "model.safetensors").exists() or "did not come" in stderr
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


def test_a_hub_that_never_answers_is_given_up(here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def odd(hub: Hub, path: str) -> bool:
        return over.wait(10)

    monkeypatch.setattr(Hub, "odd", odd)
    monkeypatch.setattr("lptune.base.hub_requests.WAIT_S", 0.2)
    code, stdout, stderr = here("download", "owner/good")
    over.set()
    assert (code, stdout, stderr) == (2, "", "error: owner/good: cannot be downloaded: timed out\n")


def _asks_to_wait(status: int, method: str, **headers: str) -> Callable[[Hub, str], bool]:
    """Answers the first question of `method` for the weights so."""
    asked: list[str] = []

    def odd(hub: Hub, path: str) -> bool:
        if asked or not path.endswith(WEIGHTS) or hub.command != method:
            return False
        asked.append(path)
        hub.send_response(status)
        for name, value in headers.items():
            hub.send_header(name.replace("_", "-"), value)
        hub.send_header("Content-Length", "0")
        hub.end_headers()
        return True

    return odd


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each sleep of half a second or more was to be; none is slept. Shorter ones are other threads'."""
    seconds: list[float] = []
    sleep = time.sleep

    def note(duration: float) -> None:
        (seconds.append if duration >= 0.5 else sleep)(duration)

    monkeypatch.setattr(time, "sleep", note)
    return seconds


NO_REQUEST_LEFT = '"api";r=0;t=100000'


@pytest.mark.parametrize("method", ["HEAD", "GET"])
@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (429, {"ratelimit": NO_REQUEST_LEFT}),
        (429, {"Retry_After": "100000"}),
        (503, {"Retry_After": "100000"}),
    ],
)
def test_a_hub_that_asks_for_a_long_wait_is_given_up_with_one_line(
    here: Command,
    monkeypatch: pytest.MonkeyPatch,
    slept: list[float],
    status: int,
    headers: dict[str, str],
    method: str,
) -> None:
    monkeypatch.setattr(Hub, "odd", _asks_to_wait(status, method, **headers))
    message = (
        f"error: owner/good: cannot be downloaded: the hub answers {status} and asks to wait 100000 s; run the "
        "command again then\n"
    )
    assert here("download", "owner/good") == (2, "", message)
    assert slept == []


def test_a_short_wait_that_the_hub_asks_for_is_said_and_waited_for(
    here: Command, monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    monkeypatch.setattr(Hub, "odd", _asks_to_wait(429, "GET", ratelimit='"api";r=0;t=7'))
    code, stdout, stderr = here("download", "owner/good")
    assert (code, stderr) == (0, "note: the hub answers 429 and asks to wait 7 s\n")
    assert "downloaded owner/good" in stdout
    assert slept == [8.0]  # huggingface_hub adds one


def test_a_request_count_that_is_not_used_up_is_no_reason_to_give_up(
    here: Command, monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    monkeypatch.setattr(Hub, "odd", _asks_to_wait(429, "GET", ratelimit='"api";r=90;t=100000'))
    code, _, stderr = here("download", "owner/good")
    assert (code, stderr, slept) == (0, "", [1])


@pytest.mark.parametrize("has_bars", [True, False])
def test_progress_bars_are_after_a_session_as_before(monkeypatch: pytest.MonkeyPatch, has_bars: bool) -> None:
    from huggingface_hub import utils

    monkeypatch.setattr("sys.stderr", io.StringIO())  # no terminal
    before = utils.are_progress_bars_disabled()
    (utils.enable_progress_bars if has_bars else utils.disable_progress_bars)()
    try:
        with hub_requests.session():
            assert utils.are_progress_bars_disabled()
        assert utils.are_progress_bars_disabled() != has_bars
    finally:
        (utils.disable_progress_bars if before else utils.enable_progress_bars)()


def test_the_limits_outlive_a_lost_connection_and_end_with_the_session() -> None:
    from huggingface_hub import close_session, get_session, set_client_factory
    from huggingface_hub.utils import httpx

    class Theirs(httpx.Client):  # type: ignore[misc]
        """As a recipe may set one, for certificates of its own."""

    set_client_factory(Theirs)
    try:
        with hub_requests.session(5.0):
            close_session()  # what huggingface_hub does when a connection fails
            client = get_session()
            assert (type(client), client.timeout.read) == (Theirs, 5.0)
            assert client.event_hooks["response"]
        assert type(get_session()) is Theirs
        assert get_session().timeout == httpx.Client().timeout
        assert not get_session().event_hooks["response"]
    finally:
        from huggingface_hub.utils._http import default_client_factory

        set_client_factory(default_client_factory)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ALL_PROXY", "socks5://user:s3cr3t@127.0.0.1:9", "ALL_PROXY: a SOCKS proxy needs the package socksio; run: "),
        ("http_proxy", "foo://user:s3cr3t@127.0.0.1:9", "http_proxy, NO_PROXY: names a proxy that cannot be used; give it as http://host:port or "),
        ("HTTPS_PROXY", "http://user:s3cr3t/more@127.0.0.1:9", "HTTPS_PROXY, NO_PROXY: names a proxy that cannot be used; "),
        ("SSL_CERT_FILE", "/nowhere/cert.pem", "SSL_CERT_FILE: cannot be read ([Errno 2] No such file or directory"),
    ],
)  # fmt: skip
def test_a_proxy_or_certificate_that_cannot_be_used_is_one_line_without_its_password(
    here: Command, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)  # as where it is not installed
    for name in set(os.environ) - {"NO_PROXY"}:
        if name.upper().endswith("_PROXY") or name.startswith("SSL_CERT"):
            monkeypatch.delenv(name)
    monkeypatch.setenv(variable, value)
    close_session()  # of an earlier test, and another environment
    code, stdout, stderr = here("download", "owner/good")
    assert (code, stdout, stderr.count("\n")) == (2, "", 1), stderr
    assert stderr.startswith(f"error: owner/good: cannot be downloaded: {message}")
    assert "s3cr3t" not in stderr
    assert variable != "ALL_PROXY" or stderr.endswith("install socksio\n")


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://user:s3cr3t@127.0.0.1:99999",
        "http://user:s3cr3t/more@127.0.0.1:9",
        "http://[::1",
        "http://127.0.0.1:9/?t=s3cr3t",
        "http://127.0.0.1:9/#s3cr3t",
        "127.0.0.1:9",
        "ftp://127.0.0.1",
        "http://",
        "",
        "http://127.0.0.1:9/a b",
    ],
)
def test_an_endpoint_that_is_no_address_of_a_hub_is_named_without_its_value(
    here: Command, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    message = (
        "error: HF_ENDPOINT: must be the address of a hub, as https://huggingface.co or http://host:8080/path, "
        "without `?`, `#` and blanks; correct or unset it\n"
    )
    assert here("download", "owner/good") == (2, "", message)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"HF_ENDPOINT": "http://127.0.0.1:99999"}, "HF_ENDPOINT: must be the address of a hub"),
        ({"HF_HUB_DOWNLOAD_TIMEOUT": "soon"}, "HF_ENDPOINT, HF_HOME, HF_HUB_DISABLE_XET, HF_HUB_DOWNLOAD_TIMEOUT: huggingface_hub does not take one of these variables (invalid literal for int() with base 10: 'soon'); correct or unset it"),
    ],
)  # fmt: skip
def test_a_variable_with_which_huggingface_hub_cannot_be_imported_is_one_line(
    hub: Lptune, environment: dict[str, str], message: str
) -> None:
    done = hub("download", "owner/good", **environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith(f"error: {message}")


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


@pytest.mark.parametrize("constant", ["HF_TOKEN_PATH", "HF_STORED_TOKENS_PATH"])
@pytest.mark.parametrize("kind", ["a pipe", "/dev/zero", "a large file", "a link to a pipe", "a folder"])
def test_a_file_of_tokens_that_has_no_end_is_not_read(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, constant: str, kind: str
) -> None:
    path = tmp_path / "token"
    if kind == "a large file":
        with path.open("wb") as file:
            file.truncate(2**40)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a link to a pipe":
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to("pipe")
    else:
        path = Path(kind)
    monkeypatch.setattr(constants, constant, str(path))
    message = (
        f"error: {path}: must be a file with a token for the hub (HF_TOKEN_PATH, HF_HOME), and is no regular "
        "file or far too large; set HF_TOKEN instead\n"
    )
    assert here("download", "owner/good") == (2, "", message)


@pytest.mark.parametrize("path", ["/dev/null", "token", "missing", "link"])
def test_a_file_with_a_token_or_none_is_no_obstacle(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    (tmp_path / "token").write_text("hf_x")
    (tmp_path / "link").symlink_to("token")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / path))
    assert here("download", "owner/good")[0] == 0


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
    ("target", "what"), [("dest", "a link to nowhere"), ("nowhere", "a link to nowhere"), ("file", "a link")]
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


def _edit(file: Path) -> None:
    file.write_bytes(b"edited")
    later = file.stat().st_mtime + 5
    os.utime(file, (later, later))


@pytest.mark.parametrize("is_noted", [True, False])
def test_changed_weights_and_files_from_elsewhere_are_named_and_left(
    here: Command, tmp_path: Path, is_noted: bool
) -> None:
    folder = tmp_path / "checkpoints" / "good"
    assert here("download", "owner/good")[0] == 0
    name = "model.safetensors" if is_noted else "config.json"
    _edit(folder / name)
    if not is_noted:
        (folder / f".cache/huggingface/download/{name}.metadata").unlink()
    before = _contents(folder)
    assert here("download", "owner/good") == (
        2,
        "",
        f"error: checkpoints/good/{name}: is not as it was downloaded from owner/good, and would be overwritten; "
        "move it away, or choose another --output-dir\n",
    )
    assert _contents(folder) == before


def test_a_kill_before_huggingface_hub_has_noted_a_file_is_no_obstacle(here: Command, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "good"
    assert here("download", "owner/good")[0] == 0
    for path in (folder / ".cache/huggingface/download").iterdir():
        path.unlink()
    assert here("download", "owner/good")[0] == 0


NEWER = "f" * 40


@pytest.mark.parametrize(
    ("edited", "upstream", "is_kept"),
    [("", "config.json", None), ("config.json", "config.json", False), ("config.json", "merges.txt", True)],
)
def test_a_newer_commit_replaces_what_was_not_edited(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edited: str, upstream: str, is_kept: bool
) -> None:
    folder = tmp_path / "checkpoints" / "good"
    assert here("download", "owner/good")[0] == 0
    if edited:  # with the time of the file that it was, as `cp -p` does
        was = (folder / edited).stat().st_mtime
        (folder / edited).write_bytes(b"edited")
        os.utime(folder / edited, (was, was))
    files = FILES | {upstream: b"newer"}

    def odd(hub: Hub, path: str) -> bool:
        if path == LIST or path.endswith(f"revision/{NEWER}"):
            siblings = [{"rfilename": file, "blobId": git_sha1(data)} for file, data in files.items()]
            _listed(sha=NEWER, siblings=siblings)(hub)
        elif path.endswith(f"tree/{NEWER}"):
            tree = [{"type": "file", "oid": git_sha1(d), "size": len(d), "path": f} for f, d in files.items()]
            hub.send(json.dumps(tree).encode())
        elif NEWER in path:
            hub.send(files[path.partition(f"{NEWER}/")[2]], commit=NEWER)
        return path == LIST or NEWER in path

    monkeypatch.setattr(Hub, "odd", odd)
    before = _contents(folder)
    code, stdout, stderr = here("download", "owner/good")
    if is_kept is False:
        assert (code, stdout) == (2, "")
        assert "config.json: is not as it was downloaded from owner/good" in stderr
        assert _contents(folder) == before
        return
    assert (code, stderr) == (0, "")
    assert stdout.startswith("kept: ") is bool(is_kept)
    assert (folder / upstream).read_bytes() == b"newer"
    assert (folder / "config.json").read_bytes() == (b"edited" if is_kept else b"newer")


def test_a_download_of_another_repository_is_left_as_it_is(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert here("download", "owner/good", "--output-dir", "d")[0] == 0
    for path in (tmp_path / "d/.cache/huggingface/download").glob("*.metadata"):
        path.write_text(path.read_text().replace(COMMIT, "e" * 40))
    before = _contents(tmp_path / "d")
    assert here("download", "owner/good", "--output-dir", "d") == (
        2,
        "",
        "error: d: holds a download of commit eeeeeeeeeeee, which owner/good does not have: it is of another "
        "repository, or the commit was removed from owner/good; choose another --output-dir\n",
    )
    assert _contents(tmp_path / "d") == before


@pytest.mark.parametrize(
    "name", ["", "huggingface", "huggingface/download", "huggingface/download/config.json.lock"]
)
@pytest.mark.parametrize("kind", ["a link", "a hard link", "a pipe"])
def test_nothing_is_written_through_a_link_among_the_notes_of_a_download(
    here: Command, tmp_path: Path, name: str, kind: str
) -> None:
    victim = tmp_path / "victim"
    planted = tmp_path / "d/.cache" / name
    planted.parent.mkdir(parents=True)
    if kind == "a pipe":
        os.mkfifo(planted)
    elif kind == "a hard link":
        victim.write_text("precious")
        os.link(victim, planted)
    else:
        victim.mkdir()
        planted.symlink_to(victim)
    message = f"error: {planted.relative_to(tmp_path)}: is {kind}, through which a download would write; remove it\n"
    assert here("download", "owner/good", "--output-dir", "d") == (2, "", message)
    assert list(victim.iterdir()) == [] if kind == "a link" else True
    assert kind != "a hard link" or victim.read_text() == "precious"


def test_a_cache_of_the_user_beside_the_notes_is_left_alone(here: Command, tmp_path: Path) -> None:
    snapshot = tmp_path / "home/.cache/huggingface/hub/models--x/snapshots/1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/1")
    assert here("download", "owner/good", "--output-dir", "home")[0] == 0
    shutil.rmtree(tmp_path / "home/.cache/huggingface/download")
    message = "error: home: is not empty, and no download lies there; choose another --output-dir\n"
    assert here("download", "owner/good", "--output-dir", "home") == (2, "", message)
    assert (snapshot / "config.json").is_symlink()


def test_an_edit_with_an_older_time_is_seen(here: Command, tmp_path: Path) -> None:
    config = tmp_path / "checkpoints/good/config.json"
    assert here("download", "owner/good")[0] == 0
    config.write_bytes(b"edited")
    os.utime(config, (1, 1))
    code, stdout, _ = here("download", "owner/good")
    assert (code, stdout.splitlines()[0].partition(",")[0]) == (0, "kept: checkpoints/good/config.json")
    assert config.read_bytes() == b"edited"


def test_a_folder_with_the_name_of_a_file_is_named(here: Command, tmp_path: Path) -> None:
    config = tmp_path / "checkpoints/good/config.json"
    assert here("download", "owner/good")[0] == 0
    config.unlink()
    config.mkdir()
    os.utime(config, (1, 1))
    message = (
        "error: checkpoints/good/config.json: is a folder, where the hub has a file; move it away, or choose "
        "another --output-dir\n"
    )
    assert here("download", "owner/good") == (2, "", message)


@pytest.mark.parametrize(
    ("name", "error"),
    [("check_place", ValueError), ("changed_files", KeyError), ("check_download", AssertionError)],
)
def test_a_bug_of_ours_is_not_said_to_be_the_hubs(
    here: Command, monkeypatch: pytest.MonkeyPatch, name: str, error: type[Exception]
) -> None:
    def broken(*_: object) -> None:
        raise error("a bug")

    monkeypatch.setattr(f"lptune.cli.hub.{name}", broken)
    code, _, stderr = here("download", "owner/good")
    assert code == 1
    assert "Traceback" in stderr
    assert NO_HUB not in stderr
