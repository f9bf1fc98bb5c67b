#!/usr/bin/env bash
# Language models of the English verses in the repository: an ordinary decoder and the tensorized transformer.
set -euo pipefail

config=verses_lm_en
size=tiny
models="transformer_lm tensorized_lm"
default_norms="ln ln+layer_scale_groups=1 gn bn brn mabn pnv pn"
prepare=prepare_verses_lm.sh
default_seeds="1 2 3"
after="average evaluate_lm"
# shellcheck source=lib/reproduce.sh
source "$(dirname "$(readlink -f "$0")")/lib/reproduce.sh"
