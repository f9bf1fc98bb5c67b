#!/usr/bin/env bash
# `pn prepare verses_lm` in the project's environment; pn_fairseq/pipeline/data/recipes/verses_lm.py has the steps.
exec bash "$(dirname "$(readlink -f "$0")")/pn" prepare verses_lm "$@"
