"""An object has other methods for a while, and then what it had."""

from contextlib import ExitStack
from itertools import permutations

import pytest

from retime.foundations.patching import layered_methods, replaced_attributes


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


@pytest.mark.parametrize("ends", list(permutations(range(3))))
def test_layers_end_in_any_order(ends):
    speaker = Speaker()
    stacks = [ExitStack() for _ in range(3)]
    for name, stack in zip("abc", stacks, strict=True):
        before = speaker.speak
        stack.enter_context(layered_methods(speaker, speak=lambda name=name, before=before: f"{name}{before()}"))
    left = ["c", "b", "a"]
    for end in ends:
        assert speaker.speak() == "".join(left) + "class"
        stacks[end].close()
        left.remove("abc"[end])
    assert speaker.speak() == "class"
    assert "speak" not in vars(speaker)


def test_a_layer_goes_back_to_an_objects_own_method():
    speaker = Speaker()
    speaker.speak = lambda: "mine"
    with layered_methods(speaker, speak=lambda: "other"):
        assert speaker.speak() == "other"
    assert speaker.speak() == "mine"
