#!/usr/bin/env bash
# The four norms on the corpus in the repository: a comparison for a laptop.
set -euo pipefail

config=verses_es_en
size=tiny
prepare=prepare_verses.sh
default_seeds="1 2"
# shellcheck source=lib/reproduce.sh
source "$(dirname "$(readlink -f "$0")")/lib/reproduce.sh"
