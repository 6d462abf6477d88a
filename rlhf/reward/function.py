"""Check of the user's functions among `reward.functions`, `path/to/file.py:name`, without running the file."""

from rlhf.errors import UserError
from rlhf.user_functions import find_function

SETTING = "reward.functions"
KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")


def check_function(spec: str) -> None:
    """UserError if `spec` names no file, no Python, no function in it, or one without the four keywords."""
    args = find_function(SETTING, spec)
    if args is None:
        return
    taken = {a.arg for a in args.args + args.kwonlyargs}
    missing = [k for k in KEYWORDS if k not in taken]
    if missing and args.kwarg is None:
        raise UserError(
            f"{SETTING}={spec}: the function does not take {', '.join(missing)}. "
            f"It is called with {', '.join(KEYWORDS)}; add **kwargs."
        )
    required = args.args[: len(args.args) - len(args.defaults)]
    required += [a for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None]
    unfilled = [a.arg for a in args.posonlyargs + required if a.arg not in KEYWORDS]
    if unfilled:
        raise UserError(
            f"{SETTING}={spec}: the function needs {', '.join(unfilled)}, but is called with "
            f"{', '.join(KEYWORDS)} only. Give a default."
        )
