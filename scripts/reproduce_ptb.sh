#!/usr/bin/env bash
# Tables 2 and 4 of the paper, PTB: the tensorized transformer, but causal (docs/language_modeling.md).
set -euo pipefail
# shellcheck source=lib/common.sh
source "$(dirname "$(readlink -f "$0")")/lib/common.sh"
run_verb reproduce ptb "$@"
