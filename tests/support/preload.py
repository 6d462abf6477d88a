"""The server that ranks of tests are forked from: it has paid for the imports once, and has no threads and no process
group."""

import multiprocessing

# Python has one such server per process, with one list of modules: whoever starts ranks takes this context, and nobody
# sets a list.
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(
    [
        "rlhf.train",
        "rlhf.launch.supervisor",
        "rlhf.worker",
        "tests.support.checkpoints",
        # Imported late, as not every rank needs them: the command line, data in files, procedural data, the report.
        "hydra",
        "datasets",
        "reasoning_gym",
        "matplotlib.figure",
        "tests.support.frozen",
    ]
)
