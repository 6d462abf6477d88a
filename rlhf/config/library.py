"""Finds configuration files: the groups of conf/ with their entries, and the recipes. Writes the help page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from rlhf.errors import UserError

PACKAGE = Path(__file__).resolve().parents[1]
HELP = """\
usage: python -m rlhf.train [recipes=NAME] [GROUP=ENTRY ...] [KEY=VALUE ...] [-m] [--config-dir DIR] [--cfg job]
                            [--help] [--version] [--info] [--shell-completion install=SHELL]

Trains a language model with reinforcement learning. The same command again resumes the run.

  recipes=NAME      a named experiment; recipes=null applies none, recipes=[a,b] applies both
  GROUP=ENTRY       one entry of a configuration group
  KEY=VALUE         one setting; wins over groups and recipes
  -m, --multirun    run each combination of the values in KEY=a,b, one after the other
  --config-dir DIR  more entries and recipes: DIR/recipes/NAME.yaml, DIR/GROUP/ENTRY.yaml
  --cfg job         print the resolved configuration (every setting, with its help) and exit
  --version         print the version and exit
  --info            print versions, devices and environment variables for a bug report, and exit
  --shell-completion install=bash   (or zsh) print a script for eval "$(...)"; short form: -sc
  --help            print this page and exit

examples:
  python -m rlhf.train
  python -m rlhf.train trainer.nproc=2 trainer.experiment_name=two_ranks
  python -m rlhf.train recipes=minimal model.path=Qwen/Qwen2.5-0.5B-Instruct data.train_files=train.jsonl
  python -m rlhf.train recipes=gsm8k_qwen_0.5b actor.optim.lr=2e-6 trainer.logger=[wandb]
  python -m rlhf.train -m actor.optim.lr=1e-5,5e-5 algorithm=grpo,rloo
"""


@dataclass(frozen=True)
class Library:
    """The bundled conf/, and the folders with recipes/ and more group entries."""

    conf: Path
    folders: tuple[Path, ...]

    @classmethod
    def find(cls, user_dir: Path | None) -> "Library":
        """Return a library of the bundled folders, then the user's.

        The bundled folders are inside the package in a wheel, and beside the package in a checkout.
        """
        root = PACKAGE if (PACKAGE / "conf").is_dir() else PACKAGE.parent
        if user_dir is None:
            return cls(root / "conf", (root,))
        user_dir = user_dir.expanduser().absolute()
        if not user_dir.is_dir():
            raise UserError(f"--config-dir {user_dir}: there is no such folder. Correct the path.")
        return cls(root / "conf", (root, user_dir))

    @property
    def groups(self) -> list[str]:
        return sorted(p.name for p in self.conf.iterdir() if p.is_dir())

    def entries(self, group: str) -> dict[str, Path]:
        """Return the files of a group (or of `recipes`) by the name that selects them.

        Raise UserError if two files have the same name.
        """
        found: dict[str, Path] = {}
        for folder in (self.conf, *self.folders):
            for path in sorted((folder / group).rglob("*.yaml")):
                name = path.relative_to(folder / group).with_suffix("").as_posix()
                if name in found and not path.samefile(found[name]):
                    raise UserError(f"{path}: {group}={name} already means {found[name]}; give this file another name.")
                found.setdefault(name, path)
        return found

    def recipes(self, overrides: Sequence[str]) -> list[str]:
        """Return the names of the recipes that a composition with these overrides applies."""
        given = [text.partition("=")[2] for text in overrides if text.startswith("recipes=")]
        if given:
            try:
                names = yaml.safe_load(given[-1])
            except yaml.YAMLError:  # several values of a sweep, such as [a],[b]
                names = given[-1]
        else:
            defaults = yaml.safe_load((self.conf / "train.yaml").read_text())["defaults"]
            names = next(entry["recipes"] for entry in defaults if isinstance(entry, dict) and "recipes" in entry)
        return [] if names is None else [str(name) for name in names] if isinstance(names, list) else [str(names)]

    def help_page(self) -> str:
        """Return usage, the groups with their entries, and the recipes with their descriptions."""
        groups = "".join(f"  {group:<14}{', '.join(self.entries(group))}\n" for group in self.groups)
        recipes = self.entries("recipes")
        width = max(map(len, recipes)) + 2
        lines = "".join(f"  {name:<{width}}{_description(path)}\n" for name, path in recipes.items())
        return f"{HELP}\ngroups:\n{groups}\nrecipes:\n{lines}"


def _description(path: Path) -> str:
    comments = (line.lstrip("# ").rstrip() for line in path.read_text().splitlines() if line.startswith("#"))
    return next((line for line in comments if not line.startswith("@package")), "")
