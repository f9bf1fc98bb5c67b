#!/usr/bin/env bash
# Language models of the English verses in the repository: an ordinary decoder and the tensorized transformer.
exec bash "$(dirname "$(readlink -f "$0")")/pn" reproduce verses_lm "$@"
