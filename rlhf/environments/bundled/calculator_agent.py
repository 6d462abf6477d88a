"""An agent that solves arithmetic problems with a calculator: a program for `env.command`.

It speaks OpenAI's chat protocol with Python's standard library alone. The reward function scores the last answer.
"""

import json
import os
import urllib.request
from typing import Any

from rlhf.environments.bundled.calculator import Calculator

TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Compute an expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "Numbers with +, -, *, / and parentheses."},
            },
            "required": ["expression"],
        },
    },
}


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Send the conversation to the policy and return the policy's message."""
    body = json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def computed(call: dict[str, Any], calculator: Calculator) -> str:
    """Return the calculator's answer to a tool call, or what is wrong with the call."""
    try:
        return calculator.calc(**json.loads(call["function"]["arguments"]))
    except (TypeError, ValueError) as error:
        return f"error: {error}"


def main() -> None:
    messages, calculator = list(json.loads(os.environ["RLHF_ROW"])["messages"]), Calculator()
    messages.append(ask(messages))
    while calls := messages[-1].get("tool_calls"):
        for call in calls:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": computed(call, calculator)})
        messages.append(ask(messages))


if __name__ == "__main__":
    main()
