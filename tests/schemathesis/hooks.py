"""Teaches Schemathesis to send rows: as lines of JSON, and as tables, good and bad."""

import json

import schemathesis


@schemathesis.serializer("application/x-ndjson")
def ndjson(ctx, value):
    values = value if isinstance(value, list) else [value]
    return "".join(json.dumps(one) + "\n" for one in values if not isinstance(one, bytes)).encode()


@schemathesis.serializer("text/csv", "text/tab-separated-values")
def table(ctx, value):
    if isinstance(value, bytes):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", errors="replace")
