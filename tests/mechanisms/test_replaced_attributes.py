"""An object has other methods for a while, and then what it had."""

import pytest

from retime.mechanisms.replaced_attributes import replaced_attributes


class Speaker:
    def __init__(self) -> None:
        self.word = "own"

    def speak(self) -> str:
        return "class"


def test_what_the_object_and_what_its_class_had_comes_back() -> None:
    speaker = Speaker()
    with replaced_attributes(speaker, speak=lambda: "other", word="another"):
        assert (speaker.speak(), speaker.word) == ("other", "another")
    assert vars(speaker) == {"word": "own"}
    assert speaker.speak() == "class"


def test_they_nest_and_come_back_after_an_error() -> None:
    speaker = Speaker()
    with replaced_attributes(speaker, speak=lambda: "outer"):
        with pytest.raises(KeyError), replaced_attributes(speaker, speak=lambda: "inner"):
            raise KeyError(speaker.speak())
        assert speaker.speak() == "outer"
    assert "speak" not in vars(speaker)
