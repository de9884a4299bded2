"""An exec handler: one JSON object per line in, one per line out. See ../protocol.md.

    [handlers.greet]
    kind = "exec"
    argv = ["python3", "docs/handlers/exec_python.py"]

What is printed to stderr goes to musterd's log. Print nothing else to stdout: it would be taken for a reply.
"""

import json
import sys


def handle(data, context):
    """The work. Raise to fail this try; the row is tried again, up to max_attempts."""
    if "name" not in data:
        raise ValueError("a row needs a name")
    return {"greeting": f"{context.get('word', 'Hello')}, {data['name']}!"}


def answer(request):
    row = request["row"]
    about = {"line": row["line"], "idempotency_key": row["idempotency_key"]}
    try:
        result = handle(row["input"], request["batch"]["context"])
        return {**about, "outcome": "succeeded", "result": result}
    except ValueError as error:  # the row is wrong, and will be wrong tomorrow
        return {**about, "outcome": "failed", "error": str(error)}
    except Exception as error:  # the world is wrong, and may be right tomorrow
        return {**about, "outcome": "retry", "error": f"{type(error).__name__}: {error}"}


def main():
    # The end of stdin is the end of the work.
    for text in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(text))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
