#!/usr/bin/env bash
# The four norms on the corpus in the repository: a comparison for a laptop.
set -euo pipefail

# shellcheck disable=SC2034 # read by lib/reproduce.sh
{
    config=verses_es_en
    size=tiny
    prepare=prepare_verses.sh
    default_seeds="1 2"
    about="The four norms on the corpus in the repository: a comparison for a laptop."
}
# shellcheck source=lib/reproduce.sh
source "$(dirname "$(readlink -f "$0")")/lib/reproduce.sh"
