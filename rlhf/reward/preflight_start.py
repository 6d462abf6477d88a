"""Starts the user's reward functions before the training, each in a reward process that scores nothing."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from rlhf.config.schema.reward import RewardConfig
from rlhf.config.user_functions import split_spec
from rlhf.errors import UserError
from rlhf.reward.scores import RewardError
from rlhf.reward.scoring_handle import ScoringProcess
from rlhf.reward.settings import NAMES, SETTING


@contextlib.contextmanager
def preflight_start(config: RewardConfig | None) -> Iterator[None]:
    """Import the file of each user function in a confined process, as the training will, while the `with` body runs.

    Then raise UserError for a file that cannot be imported in time, or a function that cannot be called.
    """
    functions = [] if config is None else [function for function in config.functions if function not in NAMES]
    if config is None or not functions:
        yield
        return
    output: list[str] = []
    processes = []
    for function in functions:
        path, name = split_spec(SETTING, function)
        processes.append(ScoringProcess(f"{path}:{name}", config, output))
    with ThreadPoolExecutor(len(processes)) as threads:
        try:
            starts = [threads.submit(process.start) for process in processes]
            yield
            for function, start in zip(functions, starts, strict=True):
                try:
                    start.result()
                except RewardError as error:
                    message = f"{SETTING}={function}: {error} Correct the file.\n{''.join(output)}".rstrip()
                    raise UserError(message) from error
        finally:
            for process in processes:
                process.stop()
            threads.shutdown()
            for process in processes:
                process.kill()
