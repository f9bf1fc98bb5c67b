#!/usr/bin/env bash
# WMT14 English-German, as in Table 1 of Shen et al. 2020, from the archives to the table beside the paper's.
set -euo pipefail
# shellcheck source=lib/common.sh
source "$(dirname "$(readlink -f "$0")")/lib/common.sh"
run_verb reproduce wmt14 "$@"
