#!/usr/bin/env bash
# Translate a subset with the model of a run (pn_fairseq/pipeline/generate.py).
set -euo pipefail
# shellcheck source=lib/common.sh
source "$(dirname "$(readlink -f "$0")")/lib/common.sh"
run_verb generate "$@"
