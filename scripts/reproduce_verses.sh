#!/usr/bin/env bash
# The four norms on the corpus that lies in the repository: a comparison for a laptop.
set -euo pipefail

root=$(CDPATH='' cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
# shellcheck disable=SC2034 # read by lib/reproduce.sh
{
    config=verses_es_en
    size=tiny
    prepare=prepare_verses.sh
    default_seeds="1 2"
    about="The four norms on the corpus that lies in the repository: a comparison for a laptop."
}
# shellcheck source=lib/reproduce.sh
source "$root/scripts/lib/reproduce.sh"
reproduce "$@"
