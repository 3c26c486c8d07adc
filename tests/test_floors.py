"""The picture in docs/architecture.md is that of the imports, the table in CONTRIBUTING.md that of owners of a step."""

import pytest

from support.floors import DRAWN, drawn, floors


@pytest.mark.parametrize("page", DRAWN)
def test_what_is_drawn_is_as_the_code_has_it(page: str) -> None:
    before, after = drawn(page)
    assert before == after, "write it anew: python tests/support/floors.py"


def test_rooms_stand_above_what_they_import() -> None:
    placed = floors("foundations")
    number = {room: floor for floor, rooms in enumerate(placed) for room in rooms}
    assert number["torch_private"] < number["storages"] < number["parts"] < number["preserve_state"]
