"""The picture in docs/architecture.md is that of the imports."""

from support.floors import PAGE, floors, page_with_picture


def test_the_picture_is_that_of_the_imports() -> None:
    page = PAGE.read_text("utf-8")
    assert page == page_with_picture(page), "write it anew: python tests/support/floors.py"


def test_rooms_stand_above_what_they_import() -> None:
    placed = floors("foundations")
    number = {room: floor for floor, rooms in enumerate(placed) for room in rooms}
    assert number["torch_private"] < number["storages"] < number["parts"] < number["preserve_state"]
