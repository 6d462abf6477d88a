"""Runs the numeric tests with the kernels of other processors: `python -m tests.support.processors [KERNELS...]`.

torch, MKL and oneDNN choose kernels by the processor's instructions; environment variables limit the instructions. A
test that passes with all of `KERNELS` does not depend on one processor's rounding. Lists the failures and the seconds
of each; exits with 1 if a test fails. `--quick` runs only the tensor functions, as in a stage of CI.
"""

import argparse
import os
import subprocess
import sys
import time

KERNELS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "default": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
"""Environment variables by name of the kernels."""
QUICK = ["tests/numerics/test_token_log_probs.py", "tests/numerics/test_losses.py"]
RUNS = [
    "tests/integration/test_digest.py",
    "tests/integration/test_training.py",
    "tests/integration/test_settings_act.py",
]


def failed(kernels: str, paths: list[str]) -> bool:
    """Run the tests with `kernels`; pytest's summary names those that fail."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "--tb=line", "-rf", *paths]
    code = subprocess.run(command, env=os.environ | KERNELS[kernels], check=False).returncode
    sys.stdout.write(f"{kernels}: {'FAILED' if code else 'passed'} after {time.monotonic() - begin:.0f} s\n")
    sys.stdout.flush()
    return code != 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.processors", description=__doc__)
    parser.add_argument("kernels", nargs="*", metavar="KERNELS", help=f"of {', '.join(KERNELS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="only the tensor functions, without ranks and runs")
    arguments = parser.parse_args()
    if unknown := set(arguments.kernels) - KERNELS.keys():
        parser.error(f"no kernels {', '.join(sorted(unknown))}")
    paths = QUICK if arguments.quick else ["tests/numerics", *RUNS]
    return int(sum(failed(name, paths) for name in arguments.kernels or KERNELS) > 0)


if __name__ == "__main__":
    sys.exit(main())
