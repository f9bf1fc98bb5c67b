#!/usr/bin/env bash
# Translate a subset with the model of a run: pn generate (pn_fairseq/pipeline/generate.py).
exec bash "$(dirname "$(readlink -f "$0")")/pn" generate "$@"
