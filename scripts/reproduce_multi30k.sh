#!/usr/bin/env bash
# The four norms on Multi30k, captions of pictures.
set -euo pipefail
# shellcheck source=lib/common.sh
source "$(dirname "$(readlink -f "$0")")/lib/common.sh"
run_verb reproduce multi30k "$@"
