"""Files that are replaced as a whole."""

import os
from pathlib import Path

import pytest

from polyspec_ext.files import replace_text, replacing


def test_a_file_is_the_old_one_until_the_new_one_is_whole(tmp_path: Path) -> None:
    place = tmp_path / "file"
    replace_text(place, "old")
    reader = place.open()  # as one that has mapped it
    with replacing(place) as part:
        part.write_text("ne")
        assert place.read_text() == "old"
        part.write_text("new")
    assert place.read_text() == "new"
    assert reader.read() == "old"
    reader.close()


def test_what_is_not_written_to_the_end_leaves_nothing(tmp_path: Path) -> None:
    place = tmp_path / "file"
    replace_text(place, "old")

    def interrupted() -> None:
        with replacing(place) as part:
            part.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(OSError, match="part"), replacing(place):
        pass  # nothing was written
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert place.read_text() == "old"


def test_what_a_killed_process_has_left_goes_after_a_day(tmp_path: Path) -> None:
    place = tmp_path / "file"
    for name, age in (("file.1.part", 2 * 86400), ("file.2.part", 60), ("other.1.part", 2 * 86400)):
        (tmp_path / name).write_text("half")
        os.utime(tmp_path / name, (0, (tmp_path / name).stat().st_mtime - age))
    replace_text(place, "new")
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {"file", "file.2.part", "other.1.part"}


def test_a_link_stays_one(tmp_path: Path) -> None:
    place, link = tmp_path / "file", tmp_path / "link"
    replace_text(place, "old")
    link.symlink_to(place)
    replace_text(link, "new")
    assert link.is_symlink()
    assert place.read_text() == "new"
