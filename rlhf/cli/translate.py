"""python -m rlhf.translate FILE: turns a configuration of verl, TRL or OpenRLHF into a recipe.

FILE is a YAML or JSON file, or a shell script with the command. The recipe goes to standard output, with comments on
all settings that have no equivalent here:

  mkdir -p my/recipes && python -m rlhf.translate run_qwen.sh > my/recipes/qwen.yaml
  python -m rlhf.train --config-dir my recipes=qwen
"""

import argparse
import sys
import tempfile
from pathlib import Path

from rlhf.cli.command import printed
from rlhf.cli.command_parser import CommandParser
from rlhf.compose import composition
from rlhf.config.library import Library
from rlhf.config.translation.foreign_file import TRAINERS, read_settings, trainer_of
from rlhf.config.translation.recipe import comment
from rlhf.config.translation.to_recipe import translate
from rlhf.errors import UserError
from rlhf.storage.files import make_dir, write_small


def main(argv: list[str] | None = None) -> int:
    """Print the recipe. Return the exit code: 0, or 2 if the file cannot be translated."""
    parser = CommandParser(
        prog="python -m rlhf.translate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a YAML, JSON or shell file")
    parser.add_argument("--trainer", choices=TRAINERS, help="the trainer of FILE (default: detected from FILE)")
    arguments = parser.parse_args(argv)

    def show() -> None:
        sys.stdout.write(recipe_of(arguments.file, arguments.trainer))

    return printed(show)


def recipe_of(path: Path, trainer: str | None = None) -> str:
    """Return the recipe for the settings in `path`, as YAML.

    If the recipe does not compose, a comment at its end gives the reason.

    Raises:
        UserError: the file has no settings of a known trainer.
    """
    settings = read_settings(path)
    trainer = trainer or trainer_of(path, settings)
    recipe = translate(trainer, settings)
    head = (
        f"Translated from {path.name}, a configuration of {trainer}. Settings for training and checkpoints whose "
        f"defaults differ here have the defaults of {trainer}."
    )
    text = recipe.as_yaml(head)
    problem = _does_not_compose(text)
    if problem is None:
        return text
    lines = "".join(comment(line, "  ") for line in problem.splitlines())
    return f"{text}\n# The recipe does not compose yet:\n{lines}"


def _does_not_compose(text: str) -> str | None:
    """Return the error message of a composition with the recipe `text`; None if there is no error."""
    with tempfile.TemporaryDirectory(prefix="rlhf-translate-") as folder:
        recipe = Path(folder, "recipes", "translated.yaml")
        make_dir(recipe.parent)
        write_small(recipe, text.encode())
        try:
            composition(["recipes=translated"], Library.find(Path(folder)))
        except UserError as error:
            return str(error).replace(str(recipe), "the recipe")
    return None
