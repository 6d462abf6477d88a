"""Runs a fresh vLLM in a separate process and writes its greedy responses to prompts.

python -m tests.support.vllm_process FOLDER IN.json OUT.json
"""

import json
import os
import sys
from pathlib import Path

RESPONSE = 12
LONGEST = 64


def main(folder: str, prompts: Path, out: Path) -> None:
    """Read and write token ids as lists of lists."""
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        distributed_executor_backend="uni",
        max_model_len=LONGEST,
        enable_chunked_prefill=False,
    )
    params = SamplingParams(temperature=0, max_tokens=RESPONSE, ignore_eos=True, detokenize=False)
    done = llm.generate([{"prompt_token_ids": ids} for ids in json.loads(prompts.read_text())], params, use_tqdm=False)
    out.write_text(json.dumps([list(request.outputs[0].token_ids) for request in done]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
