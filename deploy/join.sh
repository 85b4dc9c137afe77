#!/usr/bin/env bash
# A machine outside Kubernetes becomes a node of a cluster: checks what it needs, then is `atoll join` until it must go.
#
#   ATOLL_HEAD=head.example:6379 ATOLL_GROUP=spot ATOLL_REGION=us-east1 deploy/join.sh [options of `atoll join`]
#
#   ATOLL_HEAD        the cluster's head, HOST:PORT
#   ATOLL_GROUP       the node group that this machine is of, and ATOLL_REGION where it is
#   ATOLL_TOKEN_FILE  the cluster's secret, a file of this user alone; else /etc/atoll/token
#   ATOLL_CERTIFICATES  this machine's folder of `atoll certificates issue`; else /etc/atoll/certificates
#   ATOLL_INSECURE    1: join in the clear, where something else encrypts
#   ATOLL_UNTIL       when this machine is taken away; absent: nobody knows, and its cloud is asked
#   ATOLL_PROGRAM     the program; else `atoll` as it is found
#
# It ends with exit code 0 once its islands have given their work, 1 where the node died, 2 where something is missing.
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
command -v "$program" >/dev/null || missing "$program is not there: install atoll, or name it in ATOLL_PROGRAM"
[ -r "$token" ] || missing "$token cannot be read: copy the cluster's secret there, for this user alone (chmod 600)"

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
# signals are for the program, which leaves politely: it takes this one's place
exec "$program" join "$ATOLL_HEAD" "${options[@]}" "$@"
