#!/usr/bin/env bash
# The four norms on the corpus in the repository: a comparison for a laptop.
set -euo pipefail
# shellcheck source=lib/common.sh
source "$(dirname "$(readlink -f "$0")")/lib/common.sh"
run_verb reproduce verses "$@"
