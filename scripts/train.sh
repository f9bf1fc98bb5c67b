#!/usr/bin/env bash
# Train with the settings of a file in configs/ (pn_fairseq/pipeline/train.py).
set -euo pipefail
# shellcheck source=lib/common.sh
source "$(dirname "$(readlink -f "$0")")/lib/common.sh"
run_verb train "$@"
