"""Converts rows of MBPP for the verifier `code_tests` (`data.custom_cls` of recipes=mbpp_qwen_7b)."""

from typing import Any


def to_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a prompt that shows the tests, because they name the functions, and the tests as the answer."""
    tests = "\n".join(row["test_list"])
    prompt = f"{row['text']}\nPut Python code into one fenced block. It must pass these tests:\n```python\n{tests}\n```"
    setup = row.get("test_setup_code") or ""
    return {"prompt": prompt, "answer": [f"{setup}\n{test}" for test in row["test_list"]]}
