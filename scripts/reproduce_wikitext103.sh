#!/usr/bin/env bash
# Table 3 of the paper, WikiText-103: the tensorized transformer, but causal (docs/language_modeling.md).
set -euo pipefail

config=wikitext103_lm
size=wt103
models="tensorized_lm"
default_norms="ln bn pnv pn"
prepare=prepare_wikitext103.sh
default_seeds="1"
after="average evaluate_lm"
# shellcheck source=lib/reproduce.sh
source "$(dirname "$(readlink -f "$0")")/lib/reproduce.sh"
