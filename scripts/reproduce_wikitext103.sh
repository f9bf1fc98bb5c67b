#!/usr/bin/env bash
# Table 3 of the paper, WikiText-103: the tensorized transformer, but causal (docs/language_modeling.md).
set -euo pipefail
# shellcheck source=lib/common.sh
source "$(dirname "$(readlink -f "$0")")/lib/common.sh"
run_verb reproduce wikitext103 "$@"
