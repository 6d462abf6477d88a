"""`env.kwargs`: which class gets which argument, and what is rejected before the training."""

import pytest

from rlhf.environments.class_arguments import with_arguments
from rlhf.errors import UserError


class Plain:
    pass


class Named:
    def __init__(self, name: str, size: int = 3) -> None:
        self.name, self.size = name, size


class Open:
    checked: list[dict] = []  # noqa: RUF012

    def __init__(self, id: str, **rest: object) -> None:
        self.id, self.rest = id, rest

    @classmethod
    def _preflight(cls, **arguments: object) -> None:
        cls.checked.append(arguments)


class Alone(Plain):
    _own_process = True


def test_each_class_gets_the_arguments_that_it_accepts():
    kwargs = {"name": "n", "id": "i", "other": 1}
    plain, named, opened = [make() for make in with_arguments([Plain, Named, Open], kwargs, "pooled")]
    assert vars(plain) == {}
    assert vars(named) == {"name": "n", "size": 3}
    assert vars(opened) == {"id": "i", "rest": {"name": "n", "other": 1}}
    assert Open.checked.pop() == kwargs


@pytest.mark.parametrize(
    ("made", "kwargs", "process", "words"),
    [
        (Named, {}, "pooled", ("env.kwargs", "Named", "name", "Set env.kwargs.name=VALUE")),
        (Named, {"nmae": "n"}, "pooled", ("env.kwargs", "Named", "name", "Rename env.kwargs.nmae")),
        (Named, {"name": "n", "sise": 4}, "pooled", ("env.kwargs.sise", "Did you mean size?")),
        (Plain, {"secret": "s3cr3t"}, "pooled", ("env.kwargs.secret", "remove")),
        (Alone, {}, "pooled", ("env.process=pooled", "Alone", "env.process=episode")),
    ],
)
def test_a_mistake_is_one_message(made, kwargs, process, words):
    with pytest.raises(UserError) as error:
        with_arguments([made], kwargs, process)
    assert all(word in str(error.value) for word in words), error.value
    assert "s3cr3t" not in str(error.value)


def test_a_class_with_global_state_starts_in_its_own_process():
    assert isinstance(with_arguments([Alone], {}, "episode")[0](), Alone)
