"""Ten hostile files are read, and nothing happens."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.hostile import FILES
from tests.helpers import cold


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("hostile")
    done = cold.run("-m", "tests.faults.hostile", str(folder))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads((folder / "seen.json").read_text())


def test_ten_hostile_files_are_refused_or_read_without_a_canary(seen: Any) -> None:
    assert len(FILES) == 10
    assert seen["wrong exit codes"] == []
    assert seen["canary"] is False


def test_reading_them_unpickles_starts_and_imports_nothing(seen: Any) -> None:
    assert seen["files"] == {}


def test_training_resume_verify_and_export_unpickle_and_start_nothing(seen: Any) -> None:
    assert seen["training"] == {}


def test_the_hook_sees_what_is_planted(seen: Any) -> None:
    assert {"pickle.find_class", "os.system", "exec"} <= seen["planted"].keys()


def test_reading_a_header_that_claims_a_gigabyte_is_refused_before_it_is_mapped(tmp_path: Path) -> None:
    from lptune.base.errors import UserError
    from lptune.models.headers import read_header

    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((10**9).to_bytes(8, "little"))
        file.truncate(10**9 + 8)
    with pytest.raises(UserError, match=r"said to have 1,000,000,000 bytes.*100,000,000 is the limit"):
        read_header(path)
