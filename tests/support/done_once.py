"""Import of the server of ranks: what every run does first, and what a process is faster at afterwards. Parsers of the
command line and fonts are loaded, and the files of the library are read."""

from matplotlib.figure import Figure

from rlhf.compose import compose_config
from rlhf.config.library import Library
from rlhf.planning.device_defaults import Machine

compose_config(["trainer.total_training_steps=1"], Library.find(None), Machine(0, None))
Figure().subplots().figure.savefig("/dev/null", format="png")
