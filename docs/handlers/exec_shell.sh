#!/bin/sh
# An exec handler in plain shell: reads a request a line, answers a line. See ../protocol.md.
#
#     [handlers.shout]
#     kind = "exec"
#     argv = ["sh", "docs/handlers/exec_shell.sh"]
#
# sed is enough here because the rows are simple: {"word": "…"} without escapes. Anything more deserves a JSON reader.

while IFS= read -r request; do
    line=$(printf '%s' "$request" | sed -n 's/.*"row":{"line":\([0-9]*\).*/\1/p')
    word=$(printf '%s' "$request" | sed -n 's/.*"word": *"\([^"\\]*\)".*/\1/p')
    if [ -z "$word" ]; then
        printf '{"line":%s,"outcome":"failed","error":"a row needs a word"}\n' "$line"
    else
        printf '{"line":%s,"outcome":"succeeded","result":"%s"}\n' "$line" "$(printf '%s' "$word" | tr '[:lower:]' '[:upper:]')"
    fi
done
