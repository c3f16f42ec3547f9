"""What commands write."""

import os
from pathlib import Path

import pytest

from shardrules.cli.errors import UsageError
from shardrules.cli.files import write


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o755])
def test_files_keep_their_mode(mode: int, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("old")
    file.chmod(mode)
    write(file, "new")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", mode)


def test_new_files_have_the_usual_mode(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        write(tmp_path / "plan.json", "new")
    finally:
        os.umask(mask)
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o640


def test_folders_are_not_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write .*/plans/a/plan\.json: the folder .*/plans/a does not exist"):
        write(tmp_path / "plans" / "a" / "plan.json", "new")
    assert not (tmp_path / "plans").exists()


def test_links_stay_links(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text("old")
    (tmp_path / "link.json").symlink_to("file.json")
    write(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "file.json").read_text() == "new"
