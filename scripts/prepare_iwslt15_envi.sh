#!/usr/bin/env bash
# `pn prepare iwslt15_envi` in the project's environment; pn_fairseq/pipeline/data/recipes/iwslt15_envi.py has the steps.
exec bash "$(dirname "$(readlink -f "$0")")/pn" prepare iwslt15_envi "$@"
