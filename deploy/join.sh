#!/usr/bin/env bash
# Make a machine outside Kubernetes a node of a cluster: check what it needs, then become `atoll join` until the
# machine must leave.
#
#   ATOLL_HEAD=head.example:6379 ATOLL_GROUP=spot ATOLL_REGION=us-east1 deploy/join.sh [options of `atoll join`]
#
#   ATOLL_HEAD        the cluster's head, HOST:PORT
#   ATOLL_GROUP       this machine's node group
#   ATOLL_REGION      this machine's region
#   ATOLL_TOKEN_FILE  the cluster's secret, readable by this user only; default /etc/atoll/token
#   ATOLL_CERTIFICATES  this machine's folder of `atoll certificates issue`; default /etc/atoll/certificates
#   ATOLL_INSECURE    1: join without encryption, if something else encrypts
#   ATOLL_UNTIL       when this machine is taken away; if unset, its cloud is asked
#   ATOLL_PROGRAM     the program; default `atoll` from the PATH
#
# Exit codes: 0 after its islands have handed over their work, 1 if the node died, 2 if something is missing.
set -euo pipefail

missing() {
    echo "join.sh: $1" >&2
    exit 2
}

program=${ATOLL_PROGRAM:-atoll}
token=${ATOLL_TOKEN_FILE:-/etc/atoll/token}
[ -n "${ATOLL_HEAD:-}" ] || missing "ATOLL_HEAD is not set: give the head's HOST:PORT"
[ -n "${ATOLL_GROUP:-}" ] || missing "ATOLL_GROUP is not set: name this machine's node group"
[ -n "${ATOLL_REGION:-}" ] || missing "ATOLL_REGION is not set: say where this machine is"
command -v "$program" >/dev/null || missing "$program was not found: install atoll, or set ATOLL_PROGRAM"
[ -r "$token" ] || missing "$token cannot be read: copy the cluster's secret there, readable by this user only (chmod 600)"

certificates=${ATOLL_CERTIFICATES:-/etc/atoll/certificates}
if [ "${ATOLL_INSECURE:-}" = 1 ]; then
    encryption=(--insecure)
else
    [ -r "$certificates/tls.key" ] || missing "$certificates/tls.key cannot be read: copy the folder of \`atoll certificates issue\` there"
    encryption=(--certificates "$certificates")
fi

options=(--group "$ATOLL_GROUP" --region "$ATOLL_REGION" --token-file "$token" "${encryption[@]}")
if [ -n "${ATOLL_UNTIL:-}" ]; then
    options+=(--until "$ATOLL_UNTIL")
fi
# replace this script, so that signals reach the program, which then leaves gracefully
exec "$program" join "$ATOLL_HEAD" "${options[@]}" "$@"
