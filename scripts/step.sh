#!/bin/sh
# Runs one step of `make test` and says how long it took: `step.sh [--needs TOOL] NAME COMMAND…`.
# A step whose tool is missing is skipped with a line that says so; with CI set, a skip is a failure.
set -eu

needs=
if [ "$1" = --needs ]; then
    needs=$2
    shift 2
fi
name=$1
shift

if [ -n "$needs" ] && ! "${0%/*}/setup.sh" --check "$needs"; then
    if [ -n "${CI:-}" ]; then
        printf '== %s: FAILED: %s is missing, and CI counts a skip as a failure\n' "$name" "$needs" >&2
        exit 1
    fi
    printf '== %s: SKIPPED: %s is missing\n' "$name" "$needs" >&2
    exit 0
fi

printf '== %s\n' "$name"
started=$(date +%s)
status=0
"$@" || status=$?
took=$(($(date +%s) - started))
if [ "$status" -ne 0 ]; then
    printf '== %s: FAILED (exit %s) after %s s: %s\n' "$name" "$status" "$took" "$*" >&2
    exit "$status"
fi
printf '== %s: ok, %s s\n' "$name" "$took"
