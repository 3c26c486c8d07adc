"""Places that adding a method touches are few, and no more than those that CONTRIBUTING.md lists."""

from pathlib import Path

import pytest

from support.method_places import Copy, places

MOST = 8


@pytest.mark.long
def test_a_method_is_added_in_few_places(tmp_path: Path) -> None:
    assert len(places()) <= MOST
    assert not Copy(tmp_path).complaint_of_all()
