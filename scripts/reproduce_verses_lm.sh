#!/usr/bin/env bash
# Language models of the English verses in the repository: an ordinary decoder and the tensorized transformer.
set -euo pipefail
# shellcheck source=lib/common.sh
source "$(dirname "$(readlink -f "$0")")/lib/common.sh"
run_verb reproduce verses_lm "$@"
