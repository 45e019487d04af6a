"""A folder in memory belongs to a user and to the process that started those which write there."""

from __future__ import annotations

from pathlib import Path

import pytest

from lopsided.errors import CheckpointError
from lopsided.runtime.checkpoint import memory_folder


def test_a_folder_in_memory_goes_with_the_process_that_started_its_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path)
    home = memory_folder.open_home(Path("/some/run"))
    (home / "step-00000001").mkdir()
    assert memory_folder.open_home(Path("/some/run")) == home != memory_folder.open_home(Path("/another/run"))
    # Of one whose number has gone to another process, and of one in another container.
    space, number, began = home.parent.name.split("-")
    gone, elsewhere = (home.parent.parent / name for name in (f"{space}-{number}-{int(began) + 1}", f"1{space}-1-1"))
    gone.mkdir()
    elsewhere.mkdir()
    memory_folder.open_home(Path("/some/run"))
    assert (home / "step-00000001").exists()
    assert elsewhere.exists()
    assert not gone.exists()


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path)
    memory_folder.open_home(Path("/some/run"))
    user = next(tmp_path.iterdir())
    user.chmod(0o777)
    with pytest.raises(CheckpointError, match="is not this user's alone"):
        memory_folder.open_home(Path("/some/run"))
    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path / "none")
    with pytest.raises(CheckpointError, match="no file system in memory"):
        memory_folder.open_home(Path("/some/run"))
