#!/usr/bin/env bash
# The experiment on WMT14 English-German, from the raw text to the report (pn_fairseq/pipeline/reproduce.py).
set -euo pipefail
# shellcheck source=lib/common.sh
source "$(dirname "$(readlink -f "$0")")/lib/common.sh"
run_verb reproduce wmt14 "$@"
