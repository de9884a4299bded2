#!/bin/sh
# The manifests render, and promise what the manual says: a replica gets longer to stop than it asks for.
set -eu
cd "${0%/*}/.."

if ! command -v kubectl >/dev/null; then
    echo "check-deploy: kubectl is missing: https://kubernetes.io/docs/tasks/tools/" >&2
    exit 1
fi
rendered=$(kubectl kustomize deploy/base)

# The first number after a key, in seconds.
seconds() { sed -n "s/^ *$1[ =:\"]*\([0-9][0-9]*\).*/\1/p" | head -n 1; }
period=$(printf '%s\n' "$rendered" | seconds terminationGracePeriodSeconds)
grace=$(seconds grace <deploy/base/musterd.toml)
if [ "$period" -le "$grace" ]; then
    echo "check-deploy: terminationGracePeriodSeconds ($period) must be above shutdown.grace ($grace s)" >&2
    exit 1
fi
printf '%s\n' "$rendered" | awk '/^kind:/ { print "check-deploy: renders " $2 }'
