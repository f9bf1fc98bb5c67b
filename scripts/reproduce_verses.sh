#!/usr/bin/env bash
# Four norms on the corpus in the repository: a comparison for a laptop.
exec bash "$(dirname "$(readlink -f "$0")")/pn" reproduce verses "$@"
