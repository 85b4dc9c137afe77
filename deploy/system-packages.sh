#!/usr/bin/env bash
# Install the system packages that some tests start for real: Prometheus (with promtool), Chromium, PostgreSQL,
# curl, gcc, and network tools (iproute2). It needs Debian or a derivative, and root. It leaves installed
# packages alone. Without them those tests skip and name the missing package. `system-packages.sh image` also
# installs the tools that build and run the image, and `system-packages.sh slurm` those of a queue: slurmctld,
# slurmd, munge and the client's commands.
set -euo pipefail

declare -A package_of=([prometheus]=prometheus [promtool]=prometheus [chromium]=chromium [pg_ctlcluster]=postgresql [curl]=curl [gcc]=build-essential [ip]=iproute2 [nsenter]=util-linux)

if [ "${1:-}" = image ]; then
    package_of+=([buildah]=buildah [debootstrap]=debootstrap [bwrap]=bubblewrap [wget]=wget)
fi
if [ "${1:-}" = slurm ]; then
    package_of+=([slurmctld]=slurmctld [slurmd]=slurmd [sbatch]=slurm-client [munged]=munge [unshare]=util-linux)
fi

missing=()
for program in "${!package_of[@]}"; do
    command -v "$program" >/dev/null || missing+=("${package_of[$program]}")
done
if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "not installed (needs root and apt-get): ${missing[*]}; tests that need them will skip" >&2
    exit 0
fi

# Do not start the services of packages: the tests run their own, on their own ports.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
echo "installing system packages for tests: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
